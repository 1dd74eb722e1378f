-- The outbox itself: how one is made, kept supplied with partitions, and how its writers wake a sleeping relay.

-- Our own hash: built-in ones may change between versions of Postgres, and with them every partition of every key.
-- sha256 rather than md5, which servers in FIPS mode refuse. 31 bits, so that it is a non-negative integer anywhere.
-- Doubling the backslashes makes the text's own bytes come out of the cast to bytea, as convert_to would give them; but
-- convert_to is only STABLE, and a function that calls it can't be inlined into the generated column (four times the cost).
create function mailboat.key_slot(key text, id bigint) returns integer
    language sql immutable parallel safe
    return case
        when key is null then (id % 2147483647)::integer
        else ('x' || encode(substr(sha256(replace(key, '\', '\\')::bytea), 1, 4), 'hex'))::bit(32)::integer & 2147483647
    end;

comment on function mailboat.key_slot(text, bigint) is
    'The first 31 of the key''s SHA-256 bits (without a key: a spread of the id). slot % partitions is the partition.';

-- Wakes the relays that said they sleep. It must never hurt the business transaction it runs in (guarantee G10): whatever
-- goes wrong is swallowed, a lock on the doorbells is not waited for, and a queue that fills up is left alone (a full one
-- would fail commits). Polling is the truth; a ring that gets lost costs time only.
create function mailboat.ring() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set lock_timeout = '50ms'
as $$
begin
    if exists (select from mailboat.doorbells d where d.outbox = tg_argv[0] and d.rings)
       and pg_notification_queue_usage() <= 0.1
    then
        perform pg_notify('mailboat', tg_argv[0]);
    end if;
    return null;
exception when others then
    return null;
end
$$;

-- Asks the catalog's tables and not to_regclass: that one answers from a cache which may not have heard yet of what was
-- committed while its caller waited for a lock.
create function mailboat.has_partition(parent regclass, partition text) returns boolean
    language sql
    return exists (
        select from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid
        where i.inhparent = parent and c.relname = partition);

-- Daily partitions, named <table>_pYYYYMMDD with bounds in UTC, from today up to `ahead`. Returns how many were made.
-- There is no DEFAULT partition: it would have to be scanned, under a lock, for every new one.
-- No writer waits for it: CREATE TABLE ... PARTITION OF would lock the parent against inserts, so a table is made beside it
-- and attached, which inserts do not notice. With nothing to make it takes no lock and writes nothing.
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
    first_day   date := clock_timestamp()::date;
    last_day    date := (clock_timestamp() + ahead)::date;
    partition   text;
    made        integer := 0;
    day         date;
begin
    select n.nspname, c.relname into schema_name, table_name
    from mailboat.outboxes o, pg_class c join pg_namespace n on n.oid = c.relnamespace
    where to_regclass(o.name) = parent and c.oid = parent and c.relkind = 'p';
    if not found then
        raise exception 'there is no outbox %', outbox
            using errcode = 'undefined_table', hint = format('Make it: select mailboat.create_outbox(%L);', outbox);
    end if;
    if ahead is null or ahead < interval '0' or ahead > interval '400 days' then
        raise exception 'partitions can be made 0 to 400 days ahead, not %', coalesce(ahead::text, 'null')
            using errcode = 'invalid_parameter_value';
    end if;
    if not exists (select from pg_inherits where inhparent = parent) then
        first_day := first_day - 1;  -- a server clock that is set back a little must not fail the first writers
    end if;

    for day in select generate_series(first_day, last_day, interval '1 day')::date loop
        partition := table_name || to_char(day, '"_p"YYYYMMDD');
        continue when mailboat.has_partition(parent, partition);
        if made = 0 then
            -- Whoever comes second waits here, and then finds the work done. The first number spells 'mbot'.
            perform pg_advisory_xact_lock(1835167604, parent::oid::integer);
            continue when mailboat.has_partition(parent, partition);
        end if;
        partition := format('%I.%I', schema_name, partition);
        if to_regclass(partition) is not null then
            raise exception 'table % is in the way of a new partition of %', partition, outbox
                using errcode = 'duplicate_table', hint = 'It is not attached to the outbox: rename it, or drop it if it is not needed.';
        end if;
        execute format('create table %s (like %s including defaults including generated including constraints'
                       ' including indexes including storage including compression)', partition, parent);
        execute format('alter table %s attach partition %s for values from (%L) to (%L)',
                       parent, partition, day::timestamptz, (day + 1)::timestamptz);
        made := made + 1;
    end loop;
    return made;
end
$$;

-- Makes an outbox table, or brings what is missing to one that is there. Returns its name as kept in mailboat.outboxes.
create function mailboat.create_outbox(outbox text) returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
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
    perform pg_advisory_xact_lock(1835167604, 0);  -- the one that migrations take

    if not exists (select from pg_class where relname = parts[2]
                   and relnamespace = (select oid from pg_namespace where nspname = parts[1])) then
        if not exists (select from pg_namespace where nspname = parts[1]) then
            execute format('create schema %I', parts[1]);
        end if;
        -- Cache 1: numbers kept by a session would break the order of ids within a key.
        execute format('create sequence %s as bigint cache 1', sequence);
        execute format($table$
            create table %1$s (
                id              bigint not null default nextval(%2$L::regclass),
                xid             xid8 not null default pg_current_xact_id(),
                created_at      timestamptz not null default clock_timestamp(),
                event_id        uuid not null default gen_random_uuid(),
                event_type      text not null,
                aggregate_type  text,
                aggregate_id    text,
                key             text,
                slot            integer not null generated always as (mailboat.key_slot(key, id)) stored,
                payload         bytea,
                content_type    text not null default 'application/json',
                headers         jsonb,
                tags            text[] not null default '{}',
                traceparent     text,
                -- What no relay could carry, for those who insert by hand. One constraint, since every insert statement pays
                -- for each of them anew in a partitioned table; mailboat.emit checks the rest, and says what is wrong.
                constraint well_formed check (event_type <> '' and octet_length(key) <= 1024
                    and octet_length(payload) <= 16777216 and jsonb_typeof(headers) = 'object'),
                primary key (id, created_at)
            ) partition by range (created_at)$table$, canonical, sequence);
        execute format('alter sequence %s owned by %s.id', sequence, canonical);
        execute format('create index on %s (xid)', canonical);
        execute format('create trigger mailboat_ring after insert on %s for each statement execute function mailboat.ring(%L)',
                       canonical, canonical);
        execute format('comment on table %s is %L', canonical,
                       'A Mailboat outbox: insert events here, or call mailboat.emit(...), in the transaction they belong to.');
        if keeper <> current_user then  -- mailboat.ensure_partitions runs as the schema's owner
            execute format('alter table %s owner to %I', canonical, keeper);
        end if;
        insert into mailboat.outboxes (name) values (canonical);
        perform mailboat.grant_roles();
    elsif not exists (select from mailboat.outboxes o where o.name = canonical) then
        raise exception 'table % exists and is not an outbox made by Mailboat', canonical
            using errcode = 'duplicate_table',
                  hint = 'Choose another name, or use the table as it is: manageSchema: false with a mapping of its columns.';
    end if;

    perform mailboat.ensure_partitions(canonical);
    return canonical;
end
$$;
