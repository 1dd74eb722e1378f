-- The whole schema of Mailboat. Nothing is released yet, so this file may still change; from the first release on it does
-- not, and every change is a numbered file of its own.

-- Every function has a path of its own (`set search_path`), or a body that was bound when it was made (`return …`), or names the
-- schema of everything it uses, operators included (where every insert pays: a path costs 3 µs per call). What a user's path leads
-- to, anybody with CREATE on a schema of that path decides. So this script has one too, for whoever runs it by hand.
set local search_path = pg_catalog, pg_temp;

-- The tables in which relays keep their progress. One schema, `mailboat`, whatever the outbox tables are called.

create schema if not exists mailboat;

comment on schema mailboat is 'Mailboat: transactional outbox and the progress of its relays. Managed by `mailboat migrate`.';

-- Which tables are outboxes. `mailboat.create_outbox` adds one.
create table mailboat.outboxes (
    name        text primary key,                       -- schema-qualified, as to_regclass understands it
    writer      text not null default 'mailboat_writer',  -- the role that may emit
    relay       text not null default 'mailboat_relay', -- the role that may read events and keep progress
    created_at  timestamptz not null default now()
);

-- One row per relay process: its heartbeat renews every lease it holds at once.
create table mailboat.relays (
    id            text primary key,
    incarnation   uuid not null,                        -- one per process start
    outbox        text not null references mailboat.outboxes,
    address       text not null default '',             -- where its HTTP side listens
    serves        bigint[] not null default '{}',       -- subscriptions it is configured for
    session_lock  boolean not null,                     -- holds the advisory lock; false behind a pooler
    beat_at       timestamptz not null,
    expires_at    timestamptz not null,
    started_at    timestamptz not null default now()
) with (fillfactor = 50);

-- Relays that request NOTIFY just now. Writers never read this table (see mailboat.ring).
create table mailboat.doorbells (
    relay   text primary key,
    outbox  text not null,
    rings   boolean not null
) with (fillfactor = 10);

create table mailboat.subscriptions (
    id              bigint generated always as identity primary key,
    outbox          text not null references mailboat.outboxes,
    name            text not null,                      -- namespace/name of the resource
    uid             text not null default '',           -- of the resource that declared it last
    state           text not null default 'Running' check (state in ('Running', 'Paused')),
    declared_state  text not null default 'Running',    -- what the resource said last; a change of it wins
    paused_reason   text,
    partitions      integer not null check (partitions between 1 and 256),
    generation      integer not null default 1,         -- of the partition layout; sequence numbers start anew with it
    since_time      timestamptz,                        -- start.from: Time
    since_id        bigint,                             -- start.from: Position
    assignment_generation bigint not null default 0,
    config_version  bigint not null default 0,          -- newest configuration that named it; older ones change nothing
    declared_by     text not null default '',           -- uid of the OutboxRelay that the subscription belongs to
    retired_at      timestamptz,                        -- its resource was deleted: progress is kept for 24 hours, dead letters for ever
    created_at      timestamptz not null default now(),
    unique (outbox, name)
);

-- Heartbeats of applications that pull events (0002_consumers.sql). Writers notify while one of them is idle.
create table mailboat.consumers (
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    instance         text not null,
    outbox           text not null,
    beat_at          timestamptz not null,
    idle_until       timestamptz not null,
    primary key (subscription_id, instance)
) with (fillfactor = 50);

-- The identifier of this database: unlike its name, a restored copy on the same server has another one.
create function mailboat.database_oid() returns oid
    language sql stable
    return (select oid from pg_database where datname = current_database());

-- Progress: one small row per (subscription, partition). See docs/windows.md for what done, upto and position mean.
create table mailboat.cursors (
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    partition        integer not null,
    done             pg_snapshot not null,              -- P: everything visible in it is settled
    upto             pg_snapshot,                       -- C: the window being worked on is (done, upto]; null: none
    lowest           bigint,                            -- of a large window: its ids, found once
    highest          bigint,
    position         bigint not null default 0,         -- within the window: settled up to this id
    hi               bigint not null default 0,         -- the highest id ever settled (for rebase)
    sequence         bigint not null default 0,         -- the number of the last event settled
    resumes          integer not null default 0,        -- how often a relay died at this very position (no window open: 1, it may have been reading)
    debts            jsonb,                             -- what older partitions left undone (see repartition)
    owner            text,
    epoch            uuid,                              -- a new one with every change of owner
    released         boolean not null default true,     -- the last owner let go by itself
    assigned_to      text,                              -- who should own it, if anybody outside said so
    system_identifier bigint not null,
    timeline         integer not null,
    database_oid     oid not null default mailboat.database_oid(),
    primary key (subscription_id, partition)
) with (fillfactor = 50);

-- Events that failed and wait for their next attempt, and the later events of the same key behind them.
-- They hold the whole event: retention of the outbox never reaches them.
create table mailboat.parked (
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    ordinal          bigint generated always as identity,
    partition        integer not null,
    rank             integer not null default 1,        -- 0: replayed, goes before what waits already
    attempts         integer not null default 0,
    next_attempt_at  timestamptz,                       -- null: waits behind its key's head, or blocked
    blocked          boolean not null default false,    -- attempts used up and onExhausted is Block
    suspect          boolean not null default false,    -- relays died with it in hand: count before trying
    doomed           boolean not null default false,    -- given up on; only the dead-letter topic has not taken it yet
    replay           boolean not null default false,
    sequence         bigint not null,
    first_failed_at  timestamptz,
    last_failed_at   timestamptz,
    reason           text,
    last_error       text,
    id               bigint not null,
    event_id         uuid not null,
    event_type       text not null,
    aggregate_type   text,
    aggregate_id     text,
    key              text,
    payload          bytea,
    content_type     text not null,
    headers          jsonb,
    tags             text[] not null default '{}',
    traceparent      text,
    created_at       timestamptz not null,
    slot             integer not null,
    parked_at        timestamptz not null default clock_timestamp(),
    series_partition  integer,                          -- the series that `sequence` counts in: it survives a change of
    series_generation integer,                          -- the number of partitions
    primary key (subscription_id, ordinal)
);
create index parked_due on mailboat.parked (subscription_id, partition, next_attempt_at) where next_attempt_at is not null;

-- Events given up on.
create table mailboat.dead_letters (
    dead_id          bigint generated always as identity primary key,
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    partition        integer not null,
    attempts         integer not null,
    sequence         bigint not null,
    reason           text not null,
    last_error       text not null,
    first_failed_at  timestamptz not null,
    last_failed_at   timestamptz not null,
    died_at          timestamptz not null default clock_timestamp(),
    replayed_at      timestamptz,
    id               bigint not null,
    event_id         uuid not null,
    event_type       text not null,
    aggregate_type   text,
    aggregate_id     text,
    key              text,
    payload          bytea,
    content_type     text not null,
    headers          jsonb,
    tags             text[] not null default '{}',
    traceparent      text,
    created_at       timestamptz not null,
    slot             integer not null,
    series_partition  integer,
    series_generation integer
);
create index dead_letters_subscription on mailboat.dead_letters (subscription_id, dead_id) where replayed_at is null;

-- Progress of all outboxes lies in the same tables, and every relay may write to them: to rows of its own outbox. Triggers
-- see to that, and not row security, which relays must have off (it would hide events). They run once per statement.
-- A row whose subscription is gone was deleted with it, which was checked where the subscription was.
create function mailboat.check_rights() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Mostly there are none, and the rows need no look.
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

-- Makes a table one in which relays keep their progress. `rows`: outbox if the table has a column of that name, else
-- subscription.
create function mailboat.guard_ledger(ledger text, rows text) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('create trigger rights_insert after insert on mailboat.%I referencing new table as changed'
                   ' for each statement execute function mailboat.check_rights(%L)', ledger, rows);
    execute format('create trigger rights_delete after delete on mailboat.%I referencing old table as changed'
                   ' for each statement execute function mailboat.check_rights(%L)', ledger, rows);
    execute format('create trigger rights_update after update on mailboat.%I referencing old table as former new table as changed'
                   ' for each statement execute function mailboat.check_rights(%L)', ledger, rows);
end
$$;

select mailboat.guard_ledger(ledger, rows)
from (values ('relays', 'outbox'), ('doorbells', 'outbox'), ('subscriptions', 'outbox'), ('cursors', 'subscription'),
             ('parked', 'subscription'), ('dead_letters', 'subscription')) l(ledger, rows);

-- Whether cursors of an earlier layout (`debts`: the number of partitions, and the cursor of each) have settled an event.
-- A cursor whose layout was itself not finished carries the debts of the one before.
create function mailboat.settled_before(debts jsonb, slot integer, xid xid8, id bigint) returns boolean
    language plpgsql stable strict parallel safe
    set search_path = pg_catalog, pg_temp
as $$
declare
    cursor_of jsonb := debts -> 'cursors' -> (slot % (debts ->> 'partitions')::integer);
begin
    if cursor_of ->> 'upto' is not null
       and pg_visible_in_snapshot(xid, (cursor_of ->> 'upto')::pg_snapshot)
       and id <= (cursor_of ->> 'position')::bigint then
        return true;
    end if;
    if jsonb_typeof(cursor_of -> 'debts') = 'object' then
        return mailboat.settled_before(cursor_of -> 'debts', slot, xid, id);
    end if;
    return pg_visible_in_snapshot(xid, (cursor_of ->> 'done')::pg_snapshot);
end
$$;

-- The outbox itself: how one is made, kept supplied with partitions, and how its writers wake a sleeping relay.

-- Our own hash: built-in ones may change between versions of Postgres, and with them every partition of every key.
-- sha256 rather than md5, which servers in FIPS mode refuse. 31 bits, so that it is a non-negative integer anywhere.
-- Doubling the backslashes makes the text's own bytes come out of the cast to bytea, as convert_to would give them; but
-- convert_to is only STABLE. In PL/pgSQL, because Postgres prepares the expression of a generated column anew for every insert
-- statement: a function in SQL is parsed and inlined each time, twice in a partitioned table (30 µs each; this one 3 µs).
create function mailboat.key_slot(key text, id bigint) returns integer
    language plpgsql immutable parallel safe
as $$
begin
    if key is null then
        return (id operator(pg_catalog.%) 2147483647)::integer;
    end if;
    return ('x' operator(pg_catalog.||) pg_catalog.encode(
        pg_catalog.substr(pg_catalog.sha256(pg_catalog.replace(key, '\', '\\')::pg_catalog.bytea), 1, 4), 'hex')
    )::bit(32)::integer operator(pg_catalog.&) 2147483647;
end
$$;

comment on function mailboat.key_slot(text, bigint) is
    'The first 31 of the key''s SHA-256 bits (without a key: a spread of the id). slot % partitions is the partition.';

-- The queue of a key is found by a hash of the key: a long one does not fit into an index.
create index parked_queue on mailboat.parked (subscription_id, partition, mailboat.key_slot(key, 0), rank, ordinal);

-- ---- wake-up of idle relays and consumers

-- The value of an outbox's wake-up sequence is the time until which its writers notify, in milliseconds since 1970; 0 or none: no
-- relay and no consumer is idle. A sequence, because a writer reads it without a query and a snapshot, gets the newest value at any
-- isolation level, and walks no dead row versions while an old snapshot is open.
create function mailboat.create_wakeup_sequence() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('create sequence if not exists mailboat.wakeup_%s as bigint minvalue 0 start 0', mailboat.key_slot(new.name, 0));
    return null;
end
$$;

create trigger wakeup after insert on mailboat.outboxes for each row execute function mailboat.create_wakeup_sequence();

-- Sets the wake-up sequences of the outboxes whose relays or consumers were written: heartbeats, requests for NOTIFY and their end.
-- Only a live relay counts: one that was killed while idle leaves its row behind, and every commit would notify for ever.
-- It takes no lock, so that a hung relay delays no other. If two relays change their minds at once, the value may miss one of them
-- until its next heartbeat. Its name sorts behind rights_*: a statement without rights has failed by then.
create function mailboat.set_wakeup() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    name     text;
    deadline timestamptz;
    until    bigint;
    sequence regclass;
begin
    for name in select distinct c.outbox from changed c loop
        deadline := greatest(
            (select max(r.expires_at) from mailboat.doorbells d join mailboat.relays r on r.id = d.relay
             where d.outbox = name and d.rings),
            (select max(c.idle_until) from mailboat.consumers c where c.outbox = name));
        until := case when deadline > clock_timestamp()
                      then ceil(1000 * extract(epoch from least(deadline, clock_timestamp() + interval '5 minutes')))
                      else 0 end;
        sequence := to_regclass(format('mailboat.wakeup_%s', mailboat.key_slot(name, 0)));
        if coalesce(pg_sequence_last_value(sequence), 0) <> until then
            perform setval(sequence, until);
        end if;
    end loop;
    return null;
end
$$;

do $$
declare
    written text;
begin
    foreach written in array array['relays', 'doorbells', 'consumers'] loop
        execute format('create trigger wakeup_insert after insert on mailboat.%I referencing new table as changed'
                       ' for each statement execute function mailboat.set_wakeup()', written);
        execute format('create trigger wakeup_update after update on mailboat.%I referencing new table as changed'
                       ' for each statement execute function mailboat.set_wakeup()', written);
        execute format('create trigger wakeup_delete after delete on mailboat.%I referencing old table as changed'
                       ' for each statement execute function mailboat.set_wakeup()', written);
    end loop;
end
$$;

-- Notifies relays and consumers of an outbox. It must never hurt the business transaction it runs in (guarantee G10): whatever goes
-- wrong is swallowed, and a queue that fills up is left alone (a full one would fail commits). Polling is the truth; a notification
-- that gets lost costs time only.
create function mailboat.notify_idle(outbox text) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_notification_queue_usage() <= 0.1 then
        perform pg_notify('mailboat', outbox);
    end if;
exception when others then
    null;
end
$$;

-- The trigger of every outbox, with its name as the first argument, and that of its sequence as the second (it may be left out).
-- Nothing here can fail or wait unless the sequence is altered just then.
create function mailboat.ring() returns trigger
    language plpgsql security definer
as $$
declare
    until bigint := pg_catalog.pg_sequence_last_value(pg_catalog.to_regclass(
        coalesce(tg_argv[1], 'mailboat.wakeup_' operator(pg_catalog.||) mailboat.key_slot(tg_argv[0], 0)::text)));
begin
    if until operator(pg_catalog.>) 0 then
        if until operator(pg_catalog.>) (1000 operator(pg_catalog.*) pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())) then
            perform mailboat.notify_idle(tg_argv[0]);
        end if;
    end if;
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
-- It runs with the rights of the schema's owner, and copying a table may run functions of that table (of its indexes, of the
-- types of its columns): so it copies no table but that owner's. The owner of an outbox's schema can put another table in its
-- place at any time. The lock keeps the table, and the last check undoes all if its name leads to another one by then.
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
        first_day := first_day - 1;  -- a server clock that is set back a little must not fail the first writers
    end if;

    for day in select generate_series(first_day, last_day, interval '1 day')::date loop
        partition := table_name || to_char(day, '"_p"YYYYMMDD');
        continue when mailboat.has_partition(parent, partition);
        if made = 0 then
            -- Whoever comes second waits here, and then finds the work done. No advisory lock: anybody can hold one.
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

-- Whether a relay can carry an event, for those who insert by hand; mailboat.emit checks the rest, and says what is wrong. One
-- function in PL/pgSQL, because Postgres prepares a check anew for every insert statement: as an expression it costs 50 µs, so 7.
-- PL/pgSQL prepares an expression once per transaction, so rare ones have a branch of their own.
create function mailboat.well_formed(
    id bigint, event_type text, aggregate_type text, aggregate_id text, key text, payload bytea, content_type text, headers jsonb,
    tags text[], traceparent text
) returns boolean
    language plpgsql immutable parallel safe
as $$
begin
    if headers is not null then
        if pg_catalog.jsonb_typeof(headers) operator(pg_catalog.<>) 'object'
           or pg_catalog.octet_length(headers::text) operator(pg_catalog.>) 262144 then
            return false;
        end if;
    end if;
    if tags operator(pg_catalog.<>) '{}' then
        if pg_catalog.octet_length(tags::text) operator(pg_catalog.>) 262144 then
            return false;
        end if;
    end if;
    if payload is not null then
        if pg_catalog.octet_length(payload) operator(pg_catalog.>) 16777216 then
            return false;
        end if;
    end if;
    return id operator(pg_catalog.>) 0
        and event_type operator(pg_catalog.<>) ''
        and greatest(pg_catalog.octet_length(event_type), pg_catalog.octet_length(aggregate_type),
                     pg_catalog.octet_length(aggregate_id), pg_catalog.octet_length(key), pg_catalog.octet_length(content_type),
                     pg_catalog.octet_length(traceparent)) operator(pg_catalog.<=) 1024;
end
$$;

-- Makes an outbox table, or brings what is missing to one that is there. Returns its name as kept in mailboat.outboxes.
-- `writer` and `relay` are the roles that have rights on it, and the only ones: mailboat_writer and mailboat_relay unless they
-- are given. Given again, they replace those from before.
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
    lock table mailboat.migrations in share row exclusive mode;  -- as migrations do

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
                constraint well_formed check (mailboat.well_formed(id, event_type, aggregate_type, aggregate_id, key, payload,
                    content_type, headers, tags, traceparent)),
                primary key (id, created_at)
            ) partition by range (created_at)$table$, canonical, sequence);
        execute format('alter sequence %s owned by %s.id', sequence, canonical);
        execute format('create index on %s (xid)', canonical);
        execute format('create trigger mailboat_ring after insert on %s for each statement execute function mailboat.ring(%L, %L)',
                       canonical, canonical, 'mailboat.wakeup_' || mailboat.key_slot(canonical, 0));
        execute format('comment on table %s is %L', canonical,
                       'A Mailboat outbox: insert events here, or call mailboat.emit(...), in the transaction they belong to.');
        if keeper <> current_user then  -- mailboat.ensure_partitions runs as the schema's owner
            execute format('alter table %s owner to %I', canonical, keeper);
        end if;
        insert into mailboat.outboxes (name, writer, relay)
        values (canonical, coalesce(create_outbox.writer, 'mailboat_writer'), coalesce(create_outbox.relay, 'mailboat_relay'));
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

-- Headers as they are kept. Of a table's own column of type json, jsonb can't hold all that it may have in it (a NUL, half a
-- character, a number beyond all bounds): that is kept as text, a string.
create function mailboat.kept_headers(headers text) returns jsonb
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp
as $$
begin
    return headers::jsonb;
exception when others then
    return to_jsonb(headers);
end
$$;

-- Writing events from any language: mailboat.emit(...) and mailboat.emit_many(...), in the caller's own transaction.
-- They run with the caller's rights (see mailboat_writer below), and refuse with SQLSTATE 22023 what must not enter the
-- outbox, naming the argument: where the application can see it, not later in a relay. mailboat/emitting.py holds the same
-- rules for Python; tests/emit/test_same_rules.py holds the two to one another.

create function mailboat.invalid_argument(argument text, complaint text) returns void
    language plpgsql immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'mailboat.emit: % %', argument, complaint using errcode = 'invalid_parameter_value';
end
$$;

create function mailboat.is_json(content_type text) returns boolean
    language sql immutable parallel safe
    return content_type ~* '^([^;]*[/+])json *(;|$)';

-- Returns true, or raises when an event is not well formed. Everything but the payload: that is the business of what made it bytes.
-- It has the path of its callers, which have one of their own, and returns a value: PERFORM would run a query.
create function mailboat.check_event(
    event_type text, aggregate_type text, aggregate_id text, key text, content_type text, headers jsonb, tags text[],
    traceparent text, ordered boolean
) returns boolean
    language plpgsql immutable
as $$
declare
    control constant text := '[\x01-\x1f\x7f]';
    name  text;
    value jsonb;
    tag   text;
    extra integer := 0;  -- bytes of headers and tags
begin
    if event_type is null or event_type = '' then
        perform mailboat.invalid_argument('event_type', 'must not be empty');
    elsif length(event_type) > 255 then
        perform mailboat.invalid_argument('event_type', format('has %s characters, the limit is 255', length(event_type)));
    elsif event_type ~ control then
        perform mailboat.invalid_argument('event_type', 'must not contain control characters');
    end if;

    if aggregate_type = '' or length(aggregate_type) > 255 or aggregate_type ~ control then
        perform mailboat.invalid_argument('aggregate_type', 'must have 1 to 255 characters and no control characters');
    end if;
    if aggregate_id = '' or octet_length(aggregate_id) > 1024 then
        perform mailboat.invalid_argument('aggregate_id', 'must have 1 to 1024 bytes');
    end if;

    if key = '' then
        perform mailboat.invalid_argument('key', 'must not be empty: leave it out to keep the order of aggregate_id, or say ordered => false');
    elsif octet_length(key) > 1024 then
        perform mailboat.invalid_argument('key', format('has %s bytes, the limit is 1024', octet_length(key)));
    elsif key is not null and not ordered then
        perform mailboat.invalid_argument('key', 'and ordered => false contradict each other');
    end if;

    if content_type !~ '^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[\x20-\x7e]*)?$' or length(content_type) > 255 then
        perform mailboat.invalid_argument('content_type', 'must be a media type such as application/json');
    end if;

    if headers is not null then
        if jsonb_typeof(headers) <> 'object' then
            perform mailboat.invalid_argument('headers', 'must be an object of strings');
        end if;
        if (select count(*) from jsonb_object_keys(headers)) > 64 then
            perform mailboat.invalid_argument('headers', 'must be 64 at most');
        end if;
        for name, value in select h.key, h.value from jsonb_each(headers) h loop
            if name !~ '^[A-Za-z0-9._-]{1,128}$' then
                perform mailboat.invalid_argument('headers', format('contain the name %s: use 1 to 128 of A-Z a-z 0-9 . _ -', to_json(left(name, 128))));
            elsif name ~* '^(mailboat-|ce[_-])' or lower(name) in ('event_id', 'event_type', 'aggregate_type', 'aggregate_id',
                'created_at', 'partitionkey', 'traceparent', 'content-type') then
                perform mailboat.invalid_argument('headers', format('contain the name %s, which Mailboat sets itself', name));
            elsif jsonb_typeof(value) <> 'string' then
                perform mailboat.invalid_argument('headers.' || name, 'must be a string');
            elsif octet_length(value #>> '{}') > 4096 then
                perform mailboat.invalid_argument('headers.' || name, 'has more than 4096 bytes');
            elsif value #>> '{}' ~ control then
                perform mailboat.invalid_argument('headers.' || name, 'must not contain control characters');
            end if;
            extra := extra + octet_length(name) + octet_length(value #>> '{}');
        end loop;
    end if;

    if cardinality(tags) > 64 then
        perform mailboat.invalid_argument('tags', 'must be 64 at most');
    end if;
    foreach tag in array coalesce(tags, '{}') loop
        if tag is null or tag = '' or length(tag) > 128 or tag ~ control then
            perform mailboat.invalid_argument('tags', 'must each have 1 to 128 characters and no control characters');
        end if;
        extra := extra + octet_length(tag);
    end loop;
    if extra > 65536 then
        perform mailboat.invalid_argument('headers', format('and tags have %s bytes together, the limit is 64 KiB', extra));
    end if;

    if traceparent !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' or traceparent ~ '^(ff|..-0{32}|.{35}-0{16})' then
        perform mailboat.invalid_argument('traceparent', 'must be a W3C trace context: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>');
    end if;
    return true;
end
$$;

-- All ways in end here, or in emit_many.
create function mailboat.emit_bytes(
    event_type text, payload bytea, content_type text, aggregate_type text, aggregate_id text, key text, event_id uuid,
    headers jsonb, tags text[], traceparent text, ordered boolean, outbox text
) returns uuid
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    target regclass := to_regclass(outbox);
    chosen uuid := coalesce(event_id, gen_random_uuid());  -- not RETURNING: a writer may not read the outbox
begin
    if target is null then
        perform mailboat.invalid_argument('outbox', format('%s does not exist; make it: select mailboat.create_outbox(%L)', outbox, outbox));
    end if;
    ordered := coalesce(ordered, true);
    if mailboat.check_event(event_type, aggregate_type, aggregate_id, key, content_type, headers, tags, traceparent, ordered)
       and octet_length(payload) > 16777216 then
        perform mailboat.invalid_argument('payload', format('has %s bytes, the limit is 16 MiB: send a reference to it instead', octet_length(payload)));
    end if;
    key := case when ordered then coalesce(key, aggregate_id) end;
    headers := nullif(headers, '{}');
    tags := coalesce(tags, '{}');
    if outbox = 'mailboat.outbox' then  -- its plan is kept
        insert into mailboat.outbox (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
                                     traceparent)
        values (chosen, emit_bytes.event_type, emit_bytes.aggregate_type, emit_bytes.aggregate_id, emit_bytes.key, emit_bytes.payload,
                emit_bytes.content_type, emit_bytes.headers, emit_bytes.tags, emit_bytes.traceparent);
    else
        execute format('insert into %s (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,'
                       ' traceparent) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)', target)
            using chosen, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent;
    end if;
    return chosen;
end
$$;

create function mailboat.emit(
    event_type text, payload jsonb, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, convert_to(payload::text, 'UTF8'), coalesce(content_type, 'application/json'),
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);

-- json keeps its text as written, and so does Mailboat.
create function mailboat.emit(
    event_type text, payload json, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, convert_to(payload::text, 'UTF8'), coalesce(content_type, 'application/json'),
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);

create function mailboat.emit(
    event_type text, payload bytea, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, payload, coalesce(content_type, 'application/octet-stream'),
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);

-- What an untyped literal or parameter ends up in. It is JSON unless content_type says otherwise, and then it must be.
create function mailboat.emit(
    event_type text, payload text, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    content_type := coalesce(content_type, 'application/json');
    if mailboat.is_json(content_type) then
        begin
            perform payload::json;
        exception when data_exception then
            perform mailboat.invalid_argument('payload', 'is not JSON: say content_type => ''text/plain'' for other text');
        end;
    end if;
    return mailboat.emit_bytes(event_type, convert_to(payload, 'UTF8'), content_type,
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);
end
$$;

-- Ids of type uuid, for each type of payload: no such argument has a default, so that a call without it stays unambiguous, and an
-- untyped literal or parameter still finds the functions above (Postgres prefers text for it).
do $$
declare
    payload text;
    ids     text;
begin
    foreach payload in array array['jsonb', 'json', 'bytea', 'text'] loop
        -- In an order of their own, since functions of one name differ by the types of their arguments.
        foreach ids in array array[
            'aggregate_id uuid, aggregate_type text default null, key text default null, event_id uuid default null',
            'key uuid, event_id uuid default null, aggregate_type text default null, aggregate_id text default null',
            'aggregate_id uuid, key uuid, aggregate_type text default null, event_id uuid default null'] loop
            execute format($function$
                create function mailboat.emit(
                    event_type text, payload %s, %s, content_type text default null, headers jsonb default null, tags text[] default '{}',
                    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
                ) returns uuid
                    language sql
                    return mailboat.emit(event_type, payload, aggregate_type, aggregate_id::text, key::text, event_id, content_type,
                                         headers, tags, traceparent, ordered, outbox)$function$, payload, ids);
        end loop;
    end loop;
end
$$;

-- For writers that can only INSERT, such as an ORM's model: a row becomes a call of mailboat.emit, with its checks and its defaults
-- (the key is the aggregate id). The outbox itself has no such help: its payload is bytea, whose input syntax changes backslashes.
create view mailboat.new_events as
    select null::uuid as event_id, null::text as event_type, null::text as aggregate_type, null::text as aggregate_id, null::text as key,
           null::jsonb as payload, null::jsonb as headers, null::text[] as tags, null::text as traceparent, null::boolean as ordered,
           null::text as outbox
    where false;

comment on view mailboat.new_events is 'Insert here to emit, if mailboat.emit(...) cannot be called. Always empty.';

create function mailboat.insert_event() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    new.event_id := mailboat.emit(new.event_type, new.payload, new.aggregate_type, new.aggregate_id, new.key, new.event_id, null,
                                  new.headers, new.tags, new.traceparent, new.ordered, coalesce(new.outbox, 'mailboat.outbox'));
    return new;
end
$$;

create trigger emit instead of insert on mailboat.new_events for each row execute function mailboat.insert_event();

-- Many at once, in one statement: an array of objects whose fields are named as the arguments of mailboat.emit. The
-- payload is any JSON (with another content_type: a string, sent as its text); none, or null, is a tombstone.
-- Returns the event ids in the same order.
create function mailboat.emit_many(events jsonb, outbox text default 'mailboat.outbox') returns setof uuid
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    target regclass := to_regclass(outbox);
    strange text;
    chosen uuid[];
begin
    if target is null then
        perform mailboat.invalid_argument('outbox', format('%s does not exist; make it: select mailboat.create_outbox(%L)', outbox, outbox));
    elsif jsonb_typeof(events) is distinct from 'array' then
        perform mailboat.invalid_argument('events', 'must be an array of objects');
    elsif exists (select from jsonb_array_elements(events) e where jsonb_typeof(e) <> 'object') then
        perform mailboat.invalid_argument('events', 'must be an array of objects');
    end if;
    select f.field into strange
    from jsonb_array_elements(events) e, jsonb_object_keys(e) f(field)
    where f.field not in ('event_type', 'payload', 'aggregate_type', 'aggregate_id', 'key', 'event_id', 'content_type', 'headers',
                          'tags', 'traceparent', 'ordered')
    limit 1;
    if found then
        perform mailboat.invalid_argument('events', format('have no field %s', to_json(strange)));
    end if;

    -- Read once and kept as rows: the ids must be the same in the check, in the insert and in the answer.
    chosen := array(
        select coalesce((e.event ->> 'event_id')::uuid, gen_random_uuid())
        from jsonb_array_elements(events) with ordinality e(event, ordinal) order by e.ordinal);

    perform mailboat.check_event(r.event_type, r.aggregate_type, r.aggregate_id, r.key, coalesce(r.content_type, 'application/json'),
                                 nullif(r.headers, 'null'), r.tags, r.traceparent, coalesce(r.ordered, true))
    from jsonb_to_recordset(events) r(event_type text, aggregate_type text, aggregate_id text, key text, content_type text,
                                      headers jsonb, tags text[], traceparent text, ordered boolean);
    perform case
        when not mailboat.is_json(coalesce(r.content_type, 'application/json')) and jsonb_typeof(r.payload) not in ('string', 'null')
            then mailboat.invalid_argument('payload', format('must be a string with content_type %s', r.content_type))
        when octet_length(r.payload::text) > 16777216
            then mailboat.invalid_argument('payload', format('has %s bytes, the limit is 16 MiB: send a reference to it instead', octet_length(r.payload::text)))
    end
    from jsonb_to_recordset(events) r(content_type text, payload jsonb);

    execute format($insert$
        insert into %s (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent)
        select $2[o.ordinal], r.event_type, r.aggregate_type, r.aggregate_id,
               case when coalesce(r.ordered, true) then coalesce(r.key, r.aggregate_id) end,
               convert_to(case when mailboat.is_json(t.content_type) then nullif(r.payload, 'null')::text else r.payload #>> '{}' end, 'UTF8'),
               t.content_type, nullif(nullif(r.headers, 'null'), '{}'), coalesce(r.tags, '{}'), r.traceparent
        from jsonb_array_elements($1) with ordinality o(event, ordinal),
             jsonb_to_record(o.event) r(event_type text, payload jsonb, aggregate_type text, aggregate_id text, key text,
                                        content_type text, headers jsonb, tags text[], traceparent text, ordered boolean),
             lateral (select coalesce(r.content_type, 'application/json') as content_type) t
        order by o.ordinal$insert$, target) using events, chosen;
    return query select unnest(chosen);
end
$$;

-- Who may do what. Two group roles without login, to be granted to the users that applications and relays connect as:
--
--   grant mailboat_writer to shop_app;     may emit; may not read the outbox, nor set a position, a transaction or a time
--   grant mailboat_relay  to shop_relay;   may read outboxes and keep progress; may not write events
--
-- They have rights on the outboxes that were not given roles of their own (see mailboat.create_outbox).
--
-- Roles belong to the whole server: another database may have made them already, or be making them just now. A user who may
-- not create roles goes on without them; `mailboat migrate` then prints what an administrator should run.
do $$
declare
    role text;
begin
    foreach role in array array['mailboat_writer', 'mailboat_relay'] loop
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

revoke execute on function mailboat.ensure_partitions(text, interval), mailboat.create_outbox(text, text, text),
    mailboat.guard_ledger(text, text), mailboat.notify_idle(text) from public;

-- Grants the roles of every outbox, where they exist, what they need on it. Rights on an outbox hold for all of its partitions,
-- those made later too, since nobody reads or writes a partition but through its outbox. A table of somebody else's making, with
-- columns of other names, is written to by that somebody's rights.
create function mailboat.grant_roles() returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    outbox  record;
    ledger  regclass;
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
        foreach ledger in array mailboat.ledgers() loop
            execute format('grant select, insert, update, delete on %s to %s', ledger, outbox.relay);
        end loop;
    end loop;
end
$$;

-- The tables in which relays keep their progress.
create function mailboat.ledgers() returns regclass[]
    language sql stable
    return array(select distinct t.tgrelid::regclass from pg_trigger t where t.tgfoid = 'mailboat.check_rights'::regproc);

-- Puts other roles in the place of those that an outbox has, with their rights. What is null stays as it is.
create function mailboat.set_roles(outbox text, writer text default null, relay text default null) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    former   mailboat.outboxes := (select o from mailboat.outboxes o where to_regclass(o.name) = to_regclass(outbox));
    sequence text;
    role     text;
    ledger   regclass;
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
    -- What grant_roles gave to the former ones. To a table of somebody else's making its writers have rights from elsewhere.
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
        foreach ledger in array mailboat.ledgers() loop
            execute format('revoke all on %s from %I', ledger, former.relay);
        end loop;
    end if;
    perform mailboat.grant_roles();
end
$$;

revoke execute on function mailboat.grant_roles(), mailboat.set_roles(text, text, text) from public;
