-- An outbox with columns of other names failed every grant, and with it every migration to come.

-- Grants both roles, where they exist, what they need on every outbox. Rights on an outbox hold for all of its partitions,
-- those made later too, since nobody reads or writes a partition but through its outbox. A table of somebody else's making, with
-- columns of other names, is written to by that somebody's rights.
create or replace function mailboat.grant_roles() returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    writer  boolean := to_regrole('mailboat_writer') is not null;
    relay   boolean := to_regrole('mailboat_relay') is not null;
    outbox  record;
    ledger  regclass;
begin
    for outbox in
        select c.oid::regclass as name, n.nspname as schema_name,
               case when (select count(*) from pg_attribute a where a.attrelid = c.oid and a.attname in
                             ('id', 'event_id', 'event_type', 'aggregate_type', 'aggregate_id', 'key', 'payload', 'content_type',
                              'headers', 'tags', 'traceparent')) = 11
                    then pg_get_serial_sequence(c.oid::regclass::text, 'id') end as sequence
        from mailboat.outboxes o join pg_class c on c.oid = to_regclass(o.name) join pg_namespace n on n.oid = c.relnamespace
    loop
        if writer and outbox.sequence is not null then
            execute format('grant usage on schema mailboat, %I to mailboat_writer', outbox.schema_name);
            execute format('grant insert (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers,'
                           ' tags, traceparent) on %s to mailboat_writer', outbox.name);
            execute format('grant usage on sequence %s to mailboat_writer', outbox.sequence);
        end if;
        if relay then
            execute format('grant usage on schema mailboat, %I to mailboat_relay', outbox.schema_name);
            execute format('grant select on %s to mailboat_relay', outbox.name);
        end if;
    end loop;

    if relay then
        grant usage on schema mailboat to mailboat_relay;
        grant select on mailboat.migrations, mailboat.outboxes to mailboat_relay;
        grant execute on function mailboat.ensure_partitions(text, interval) to mailboat_relay;
        for ledger in
            select c.oid
            from pg_class c
            where c.relnamespace = 'mailboat'::regnamespace and c.relkind = 'r' and not c.relispartition
              and c.relname not in ('migrations', 'outboxes') and c.relname !~ '_p\d{8}$'
        loop
            execute format('grant select, insert, update, delete on %s to mailboat_relay', ledger);
        end loop;
    end if;
end
$$;
