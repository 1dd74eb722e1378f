-- Rights: triggers that check rows, roles, and grants.

-- Check that a relay writes only rows of its own outbox. The progress of all outboxes is in the same tables, and every relay role
-- has rights on them. Row security can't be used, because relays must have it off (it would hide events). The triggers run once
-- per statement, and only if outboxes have different relay roles.
-- If the subscription of a row is gone, the row was deleted by its foreign key, and the rights were checked on the subscription.
create function mailboat.check_rights() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Usually empty, and then no row is checked.
    others text[] := array(select o.name from mailboat.outboxes o
                           where pg_has_role(to_regrole(quote_ident(o.relay)), 'usage') is not true);
    denied record;
begin
    if others = '{}' or (select pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = 'mailboat') then
        return null;
    end if;
    if tg_argv[0] = 'outbox' then
        if tg_op = 'UPDATE' then
            select t.outbox into denied
            from (select c.outbox from changed c union all select f.outbox from former f) t
            where t.outbox = any (others);
        else
            select c.outbox into denied from changed c where c.outbox = any (others);
        end if;
    elsif tg_op = 'UPDATE' then
        select s.outbox into denied
        from (select c.subscription_id from changed c union select f.subscription_id from former f) t
        join mailboat.subscriptions s on s.id = t.subscription_id
        where s.outbox = any (others);
    else
        select s.outbox into denied
        from changed c join mailboat.subscriptions s on s.id = c.subscription_id
        where s.outbox = any (others);
    end if;
    if found then
        raise exception 'user % may not keep the progress of outbox %', current_user, denied.outbox
            using errcode = 'insufficient_privilege', hint = 'Grant it the relay role of that outbox (see mailboat.outboxes).';
    end if;
    return null;
end
$$;

-- 1 while all outboxes have the same relay role; 2 once they had different ones; no value before the first outbox. With one role,
-- the grants on the tables suffice. A sequence, because the condition of a trigger can read it without a query: the check was a
-- third of the cost of a settlement. The value never goes back, not even by a rollback: an unnecessary check is harmless.
create sequence mailboat.relay_roles;
grant select on sequence mailboat.relay_roles to public;

create function mailboat.count_relay_roles() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- If two transactions change roles at once, the later one sees the roles of the first, or fails with a deadlock.
    lock table mailboat.outboxes in share row exclusive mode;
    if (select count(distinct o.relay) from mailboat.outboxes o) > 1 then
        perform setval('mailboat.relay_roles', 2);
    elsif pg_sequence_last_value('mailboat.relay_roles') is null then
        perform setval('mailboat.relay_roles', 1);
    end if;
    return null;
end
$$;

create trigger relay_roles after insert or update on mailboat.outboxes
    for each statement execute function mailboat.count_relay_roles();

-- Add the triggers to a table with progress of relays. `rows`: outbox if the table has a column of that name, else subscription.
create function mailboat.guard_progress_table(progress_table text, rows text) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    change text[];
begin
    foreach change slice 1 in array array[['insert', 'new table as changed'], ['delete', 'old table as changed'],
                                          ['update', 'old table as former new table as changed']] loop
        execute format('create trigger rights_%1$s after %1$s on mailboat.%2$I referencing %3$s for each statement'
                       ' when (pg_catalog.pg_sequence_last_value(''mailboat.relay_roles''::pg_catalog.regclass) is distinct from 1)'
                       ' execute function mailboat.check_rights(%4$L)', change[1], progress_table, change[2], rows);
    end loop;
end
$$;

select mailboat.guard_progress_table(progress_table, rows)
from (values ('relays', 'outbox'), ('wakeup_requests', 'outbox'), ('subscriptions', 'outbox'), ('cursors', 'subscription'),
             ('parked', 'subscription'), ('dead_letters', 'subscription'), ('pull_policies', 'subscription')
     ) l(progress_table, rows);

-- Three group roles without login, to be granted to the users of applications and relays:
--
--   grant mailboat_writer   to shop_app;    may emit; may not read the outbox, nor set a position, a transaction or a time
--   grant mailboat_relay    to shop_relay;  may read outboxes and keep progress; may not write events
--   grant mailboat_consumer to shop_view;   may pull what mailboat.grant_consumer allows
--
-- The first two have rights on the outboxes without roles of their own (see mailboat.create_outbox).
--
-- Roles belong to the whole server: another database may have created them already, or be creating them now. If the user may not
-- create roles, the migration continues without them, and `mailboat migrate` prints the statements for an administrator.
do $$
declare
    role text;
begin
    foreach role in array array['mailboat_writer', 'mailboat_relay', 'mailboat_consumer'] loop
        begin
            if not exists (select from pg_roles where rolname = role) then
                execute format('create role %I nologin', role);
            end if;
        exception
            when duplicate_object or unique_violation then null;
            when insufficient_privilege then null;
        end;
    end loop;
end
$$;

-- The role of the caller. In a SECURITY DEFINER function, current_user is the owner.
create function mailboat.caller() returns name
    language sql stable
    set search_path = pg_catalog, pg_temp
    return case when current_setting('role') in ('none', '') then session_user else current_setting('role')::name end;

-- Raise unless the caller may act as this consumer: by a grant, as the relay of the subscription's outbox, or as the owner of the
-- schema. `of_outbox` is empty for a name that is used with mailboat.once.
create function mailboat.check_consumer(consumer text, of_outbox text) returns void
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_has_role(mailboat.caller(), (select nspowner from pg_namespace where nspname = 'mailboat'), 'usage')
       or exists (select from mailboat.outboxes o join pg_roles r on r.rolname = o.relay
                  where o.name = of_outbox and pg_has_role(mailboat.caller(), r.oid, 'usage'))
       or exists (select from mailboat.consumer_grants g join pg_roles r on r.rolname = g.role
                  where g.consumer = check_consumer.consumer and g.outbox = of_outbox
                    and pg_has_role(mailboat.caller(), r.oid, 'usage'))
    then
        return;
    end if;
    raise exception 'role % may not consume %', mailboat.caller(), consumer
        using errcode = 'insufficient_privilege',
              hint = format('The owner of schema mailboat can allow it: select mailboat.grant_consumer(%L, %L);',
                            consumer, mailboat.caller());
end
$$;

-- The outbox of a subscription; empty if there is no subscription of that name. Raises if there are several.
create function mailboat.outbox_of(consumer text) returns text
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    outboxes text[] := array(select s.outbox from mailboat.subscriptions s where s.name = consumer and s.retired_at is null);
begin
    if cardinality(outboxes) > 1 then
        raise exception 'subscription % exists in several outboxes', consumer
            using errcode = 'ambiguous_parameter', hint = 'Name the one that is meant: outbox => ''...''.';
    end if;
    return coalesce(outboxes[1], '');
end
$$;

-- Allow a role to pull a subscription, or to use mailboat.once under a name. The role must be a member of mailboat_consumer as
-- well.
create function mailboat.grant_consumer(consumer text, role text, outbox text default null) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regrole(quote_ident(role)) is null then
        raise exception 'there is no role %', role using errcode = 'undefined_object';
    end if;
    insert into mailboat.consumer_grants (consumer, outbox, role)
    values (grant_consumer.consumer, coalesce(grant_consumer.outbox, mailboat.outbox_of(grant_consumer.consumer)),
            grant_consumer.role::name)
    on conflict do nothing;
end
$$;

create function mailboat.revoke_consumer(consumer text, role text) returns void
    language sql
    set search_path = pg_catalog, pg_temp
    begin atomic
        delete from mailboat.consumer_grants g
        where g.consumer = revoke_consumer.consumer and g.role = revoke_consumer.role::name;
    end;

-- Grant the roles of every outbox, if they exist, the rights that they need on it. Rights on an outbox cover all of its
-- partitions, including later ones, because partitions are accessed only through their outbox. Writers of an existing table with
-- other column names get no rights here; its owner grants them.
create function mailboat.grant_roles() returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    outbox  record;
    progress_table  regclass;
begin
    for outbox in
        select c.oid::regclass as name, n.nspname as schema_name, to_regrole(quote_ident(o.writer)) as writer,
               to_regrole(quote_ident(o.relay)) as relay,
               case when (select count(*) from pg_attribute a where a.attrelid = c.oid and a.attname in
                             ('id', 'event_id', 'event_type', 'aggregate_type', 'aggregate_id', 'key', 'payload', 'content_type',
                              'headers', 'tags', 'traceparent')) = 11
                    then pg_get_serial_sequence(c.oid::regclass::text, 'id') end as sequence
        from mailboat.outboxes o join pg_class c on c.oid = to_regclass(o.name) join pg_namespace n on n.oid = c.relnamespace
    loop
        if outbox.writer is not null and outbox.sequence is not null then
            execute format('grant usage on schema mailboat, %I to %s', outbox.schema_name, outbox.writer);
            execute format('grant insert (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers,'
                           ' tags, traceparent) on %s to %s', outbox.name, outbox.writer);
            execute format('grant usage on sequence %s to %s', outbox.sequence, outbox.writer);
            execute format('grant insert on mailboat.new_events to %s', outbox.writer);
        end if;
        continue when outbox.relay is null;
        execute format('grant usage on schema mailboat, %I to %s', outbox.schema_name, outbox.relay);
        execute format('grant select on %s, mailboat.migrations, mailboat.outboxes to %s', outbox.name, outbox.relay);
        execute format('grant execute on function mailboat.ensure_partitions(text, interval) to %s', outbox.relay);
        foreach progress_table in array mailboat.progress_tables() loop
            execute format('grant select, insert, update, delete on %s to %s', progress_table, outbox.relay);
        end loop;
    end loop;
    perform mailboat.grant_consumer_role();
end
$$;

-- The tables with progress of relays.
create function mailboat.progress_tables() returns regclass[]
    language sql stable
    return array(select distinct t.tgrelid::regclass from pg_trigger t where t.tgfoid = 'mailboat.check_rights'::regproc);

-- Replace the roles of an outbox, and move their rights. A null argument leaves that role unchanged.
create function mailboat.set_roles(outbox text, writer text default null, relay text default null) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    former   mailboat.outboxes := (select o from mailboat.outboxes o where to_regclass(o.name) = to_regclass(outbox));
    sequence text;
    role     text;
    progress_table   regclass;
begin
    if former.name is null then
        raise exception 'there is no outbox %', outbox
            using errcode = 'undefined_table', hint = format('Make it: select mailboat.create_outbox(%L);', outbox);
    end if;
    foreach role in array array_remove(array[set_roles.writer, set_roles.relay], null) loop
        if to_regrole(quote_ident(role)) is null then
            raise exception 'there is no role %', role
                using errcode = 'undefined_object', hint = format('Create it first: create role %I;', role);
        end if;
    end loop;
    update mailboat.outboxes o
    set writer = coalesce(set_roles.writer, o.writer), relay = coalesce(set_roles.relay, o.relay)
    where o.name = former.name
      and (o.writer, o.relay) is distinct from (coalesce(set_roles.writer, o.writer), coalesce(set_roles.relay, o.relay));
    if not found then
        return;
    end if;
    -- Revoke the grants of grant_roles from the former roles. The writers of an existing table have rights from its owner, which
    -- stay.
    select pg_get_serial_sequence(former.name, a.attname) into sequence
    from pg_class c
    join pg_namespace n on n.nspname = 'mailboat' and n.nspowner = c.relowner
    join pg_attribute a on a.attrelid = c.oid and a.attname = 'id'
    where c.oid = to_regclass(former.name);
    if sequence is not null and to_regrole(quote_ident(former.writer)) is not null then
        execute format('revoke insert on %s from %I', former.name, former.writer);
        execute format('revoke usage on sequence %s from %I', sequence, former.writer);
    end if;
    if to_regrole(quote_ident(former.relay)) is not null then
        execute format('revoke select on %s from %I', former.name, former.relay);
        foreach progress_table in array mailboat.progress_tables() loop
            execute format('revoke all on %s from %I', progress_table, former.relay);
        end loop;
    end if;
    perform mailboat.grant_roles();
end
$$;

-- Grant mailboat_consumer and the relay roles, if they exist, the functions that consumers call. Each function checks the caller
-- with mailboat.check_consumer.
create function mailboat.grant_consumer_role() returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    role text;
begin
    for role in select 'mailboat_consumer' union select 'mailboat_relay' union select o.relay from mailboat.outboxes o loop
        if to_regrole(quote_ident(role)) is not null then
            execute format('grant usage on schema mailboat to %I', role);
            execute format(
                'grant execute on function mailboat.pull(text, integer, text),'
                ' mailboat.refuse(text, uuid, text, text, boolean, interval, boolean, text), mailboat.once(text, uuid),'
                ' mailboat.forget(text, uuid), mailboat.prune_handled(text, interval, integer),'
                ' mailboat.heartbeat(text, text, interval, text), mailboat.leave(text, text, text), mailboat.maintain(text, text), mailboat.consumer_settings(text, text),'
                ' mailboat.pull_lag(text, integer, text),'
                ' mailboat.inbox_claim(text, text, text, interval, uuid[], uuid[], uuid[]),'
                ' mailboat.inbox_renew(text, text, text, interval, uuid[]),'
                ' mailboat.inbox_fail(text, text, text, uuid[], integer[], integer[], double precision[], boolean),'
                ' mailboat.inbox_done(text, uuid[]), mailboat.inbox_leave(text, text, text) to %I', role);
        end if;
    end loop;
end
$$;

-- Revoke execution from PUBLIC for functions that are internal or have explicit grants. (A call of mailboat.make_journals or
-- mailboat.make_readers by another user is harmless: both only restore the declared state.)
do $$
declare
    internal regprocedure;
begin
    for internal in
        select p.oid from pg_proc p
        where p.pronamespace = 'mailboat'::regnamespace
          and p.proname in (
            'ensure_partitions', 'create_outbox', 'guard_progress_table', 'notify_idle', 'grant_roles', 'set_roles',
            'grant_consumer_role', 'grant_consumer', 'revoke_consumer', 'outbox_of', 'drop_journals', 'read_chunk', 'window_bounds',
            'whole_groups', 'park_event', 'schedule_heads', 'emit_dead_letters', 'give_up', 'journal_entry', 'record_attempt',
            'lock_cursor', 'save_cursor', 'fresh_partitions', 'take_parked', 'take_window', 'pull', 'once', 'forget',
            'prune_handled', 'heartbeat', 'leave', 'maintain', 'consumer_settings', 'pull_lag', 'inbox_claim', 'inbox_renew',
            'inbox_fail', 'inbox_done', 'inbox_leave')
           or p.oid = 'mailboat.refuse(text, uuid, text, text, boolean, interval, boolean, text)'::regprocedure
    loop
        execute format('revoke execute on function %s from public', internal);
    end loop;
end
$$;
