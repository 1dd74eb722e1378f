-- Outbox tables: their check constraint, their time partitions, and their creation.

-- Types of the columns of an outbox. Their constraints are for rows that are inserted without mailboat.emit, which checks more and
-- reports the argument. Domains, because Postgres keeps their constraints prepared for a session. A check constraint of a table is
-- read and prepared again by every insert statement: such an expression took 50 µs, a function in PL/pgSQL 5, these domains 2 to 3.
create domain mailboat.position as bigint
    constraint well_formed check (value > 0);
create domain mailboat.short_text as text
    constraint well_formed check (octet_length(value) <= 1024);
create domain mailboat.event_type as text
    constraint well_formed check (value <> '' and octet_length(value) <= 1024);
create domain mailboat.payload as bytea
    constraint well_formed check (octet_length(value) <= 16777216);
create domain mailboat.headers as jsonb
    constraint well_formed check (jsonb_typeof(value) = 'object' and octet_length(value::text) <= 262144);
create domain mailboat.tags as text[]
    constraint well_formed check (cardinality(value) = 0 or octet_length(value::text) <= 262144);

-- Whether an outbox has a partition of this name. Reads the catalog and not to_regclass, which answers from a cache: the cache
-- may not contain yet partitions that were committed while the caller waited for a lock.
create function mailboat.has_partition(parent regclass, partition text) returns boolean
    language sql
    return exists (
        select from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid
        where i.inhparent = parent and c.relname = partition);

-- Create daily time partitions, named <table>_pYYYYMMDD with bounds in UTC, from today up to `ahead`, and return their number.
-- There is no DEFAULT partition: each new partition would require a scan of it under a lock.
-- No writer waits: CREATE TABLE ... PARTITION OF would lock the parent against inserts, so a separate table is created and then
-- attached, which does not conflict with inserts. If no partition is missing, the function takes no lock and writes nothing.
-- The function runs with the rights of the schema's owner. Copying a table may run functions of that table (of its indexes, of
-- the types of its columns), so only a table of that owner is copied. The owner of an outbox's schema can replace the table by
-- another one at any time. The lock keeps the table, and the last check rolls everything back if the name refers to another table
-- by then.
create function mailboat.ensure_partitions(outbox text, ahead interval default '30 days') returns integer
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set lock_timeout = '5s'
    set timezone = 'UTC'
as $$
declare
    parent      regclass := to_regclass(outbox);
    schema_name name;
    table_name  name;
    keeper      name;
    owner       name;
    first_day   date := clock_timestamp()::date;
    last_day    date := (clock_timestamp() + ahead)::date;
    partition   text;
    qualified   text;
    made        integer := 0;
    day         date;
begin
    select n.nspname, c.relname, pg_get_userbyid(c.relowner), pg_get_userbyid(m.nspowner)
    into schema_name, table_name, owner, keeper
    from mailboat.outboxes o, pg_namespace m, pg_class c join pg_namespace n on n.oid = c.relnamespace
    where to_regclass(o.name) = parent and c.oid = parent and c.relkind = 'p' and m.nspname = 'mailboat';
    if not found then
        raise exception 'there is no outbox %', outbox
            using errcode = 'undefined_table', hint = format('Make it: select mailboat.create_outbox(%L);', outbox);
    end if;
    if owner <> keeper then
        raise exception 'outbox % is owned by %, and partitions are made with the rights of %', outbox, owner, keeper
            using errcode = 'insufficient_privilege',
                  hint = format('If the table is as it should be: alter table %s owner to %I;', parent, keeper);
    end if;
    if ahead is null or ahead < interval '0' or ahead > interval '400 days' then
        raise exception 'partitions can be made 0 to 400 days ahead, not %', coalesce(ahead::text, 'null')
            using errcode = 'invalid_parameter_value';
    end if;
    if not exists (select from pg_inherits where inhparent = parent) then
        first_day := first_day - 1;  -- the clock may be set back a little before the first write
    end if;

    for day in select generate_series(first_day, last_day, interval '1 day')::date loop
        partition := table_name || to_char(day, '"_p"YYYYMMDD');
        continue when mailboat.has_partition(parent, partition);
        if made = 0 then
            -- A concurrent call waits here and then finds the partitions. No advisory lock, because any user can hold one.
            execute format('lock table only %s in share update exclusive mode', parent);
            continue when mailboat.has_partition(parent, partition);
        end if;
        qualified := format('%I.%I', schema_name, partition);
        if to_regclass(qualified) is not null then
            raise exception 'table % is in the way of a new partition of %', qualified, outbox
                using errcode = 'duplicate_table', hint = 'It is not attached to the outbox: rename it, or drop it if it is not needed.';
        end if;
        execute format('create table %s (like %s including defaults including generated including constraints'
                       ' including indexes including storage including compression)', qualified, parent);
        execute format('alter table %s attach partition %s for values from (%L) to (%L)',
                       parent, qualified, day::timestamptz, (day + 1)::timestamptz);
        if not mailboat.has_partition(parent, partition) then
            raise exception 'outbox % was replaced while a partition was made for it', outbox using errcode = 'insufficient_privilege';
        end if;
        made := made + 1;
    end loop;
    return made;
end
$$;

-- Create an outbox table, or add the missing parts to an existing one. Return its name as stored in mailboat.outboxes. `writer`
-- and `relay` are the only roles with rights on the table. Defaults: mailboat_writer and mailboat_relay. Given for an existing
-- outbox, they replace its current roles.
create function mailboat.create_outbox(outbox text, writer text default null, relay text default null) returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set lock_timeout = '10s'
as $$
declare
    parts     text[] := parse_ident(outbox);
    canonical text;
    sequence  text;
    keeper    name := (select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'mailboat');
begin
    if cardinality(parts) <> 2 then
        raise exception 'an outbox is named schema.table, not %', outbox using errcode = 'invalid_parameter_value';
    end if;
    if octet_length(parts[2]) > 53 then  -- room for _pYYYYMMDD within the 63 bytes of a name
        raise exception 'the name of an outbox table has at most 53 bytes: %', parts[2] using errcode = 'name_too_long';
    end if;
    canonical := format('%I.%I', parts[1], parts[2]);
    sequence := format('%I.%I', parts[1], parts[2] || '_id_seq');
    lock table mailboat.migrations in share row exclusive mode;  -- the lock of migrations

    if not exists (select from pg_class where relname = parts[2]
                   and relnamespace = (select oid from pg_namespace where nspname = parts[1])) then
        if not exists (select from pg_namespace where nspname = parts[1]) then
            execute format('create schema %I', parts[1]);
        end if;
        -- Cache 1: values cached by a session would break the order of ids within a key.
        execute format('create sequence %s as bigint cache 1', sequence);
        execute format($table$
            create table %1$s (
                id              mailboat.position not null default nextval(%2$L::regclass),
                xid             xid8 not null default pg_current_xact_id(),
                created_at      timestamptz not null default clock_timestamp(),
                event_id        uuid not null default gen_random_uuid(),
                event_type      mailboat.event_type not null,
                aggregate_type  mailboat.short_text,
                aggregate_id    mailboat.short_text,
                key             mailboat.short_text,
                slot            integer not null generated always as (mailboat.key_slot(key, id)) stored,
                payload         mailboat.payload,
                content_type    mailboat.short_text not null default 'application/json',
                headers         mailboat.headers,
                tags            mailboat.tags not null default '{}',
                traceparent     mailboat.short_text,
                primary key (id, created_at)
            ) partition by range (created_at)$table$, canonical, sequence);
        execute format('alter sequence %s owned by %s.id', sequence, canonical);
        execute format('create index on %s (xid)', canonical);
        insert into mailboat.outboxes (name, writer, relay)
        values (canonical, coalesce(create_outbox.writer, 'mailboat_writer'), coalesce(create_outbox.relay, 'mailboat_relay'));
        -- The insert above created the sequence. The condition saves the call of the function while no relay is idle. Every insert
        -- statement reads and prepares the condition again, so it has no operator.
        execute format('create trigger mailboat_notify after insert on %1$s for each statement'
                       ' when (pg_catalog.pg_sequence_last_value(%3$L::pg_catalog.regclass) is not null)'
                       ' execute function mailboat.notify_on_insert(%2$L, %3$L)',
                       canonical, canonical, 'mailboat.wakeup_' || mailboat.key_slot(canonical, 0));
        execute format('comment on table %s is %L', canonical,
                       'A Mailboat outbox: insert events here, or call mailboat.emit(...), in the transaction they belong to.');
        if keeper <> current_user then  -- mailboat.ensure_partitions runs as the schema's owner
            execute format('alter table %s owner to %I', canonical, keeper);
        end if;
        perform mailboat.grant_roles();
    elsif not exists (select from mailboat.outboxes o where o.name = canonical) then
        raise exception 'table % exists and is not an outbox made by Mailboat', canonical
            using errcode = 'duplicate_table',
                  hint = 'Choose another name, or use the table as it is: manageSchema: false with a mapping of its columns.';
    end if;

    perform mailboat.set_roles(canonical, create_outbox.writer, create_outbox.relay);
    perform mailboat.ensure_partitions(canonical);
    return canonical;
end
$$;

-- Headers as jsonb. A column of type json in an existing table may have content that jsonb can't hold (a NUL, half of a surrogate
-- pair, a number out of range). Such headers are kept as text, in a JSON string.
create function mailboat.headers_to_jsonb(headers text) returns jsonb
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp
as $$
begin
    return headers::jsonb;
exception when others then
    return to_jsonb(headers);
end
$$;
