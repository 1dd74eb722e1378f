-- The schema of Mailboat. The files of this folder, in the order of their names, are one migration. Nothing is released yet, so
-- they may still change. From the first release on they do not change, and every change is a separate migration.
--
--   10_tables     all tables, with the two functions that their columns use
--   20_outbox     creation of outbox tables and of their time partitions
--   30_emit       mailboat.emit(...): writing events
--   40_wakeup     NOTIFY while a relay or a consumer is idle
--   50_windows    reading the events of a window
--   60_parked     events that failed: parked, retried, dead
--   65_attempts   counting attempts that a rollback must not undo
--   70_pull       mailboat.pull(...): events and progress in the consumer's transaction
--   75_consumers  heartbeat, maintenance, settings and lag of consumers that pull
--   80_inbox      mailboat.once(...) and the inbox of consumers behind a broker
--   90_rights     roles, grants, and the triggers that check them

-- The search path of a caller must not matter: any user with CREATE on a schema of that path could plant objects there. So every
-- function sets its own path (`set search_path`), or has a body that was bound at creation (`return …`), or qualifies every name,
-- including operators. The last form is for functions that every insert calls, because a path costs 3 µs per call. This script
-- sets a path too, in case it is run by hand.
set local search_path = pg_catalog, pg_temp;

-- One schema, `mailboat`, regardless of the names of the outbox tables. It exists already: it holds the table of migrations.
comment on schema mailboat is 'Mailboat: transactional outbox and the progress of its relays. Managed by `mailboat migrate`.';

-- A separate hash function: built-in ones may change between versions of Postgres, and with them the partition of every key.
-- sha256 and not md5, which servers in FIPS mode refuse. 31 bits, so that the value is a non-negative integer in every language.
-- With doubled backslashes, the cast to bytea yields the bytes of the text, the same as convert_to, which is only STABLE. In
-- PL/pgSQL, because Postgres prepares the expression of a generated column again for every insert statement: a function in SQL is
-- parsed and inlined each time, twice in a partitioned table (30 µs each; this one 3 µs).
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

-- The OID of this database. Unlike the name, it differs in a restored copy on the same server.
create function mailboat.database_oid() returns oid
    language sql stable
    return (select oid from pg_database where datname = current_database());

-- The tables that are outboxes. `mailboat.create_outbox` adds one.
create table mailboat.outboxes (
    name        text primary key,                       -- schema-qualified, as to_regclass understands it
    writer      text not null default 'mailboat_writer',  -- the role that may emit
    relay       text not null default 'mailboat_relay', -- the role that may read events and keep progress
    created_at  timestamptz not null default now()
);

-- One row per relay process. Its heartbeat renews all leases of the relay at once.
create table mailboat.relays (
    id            text primary key,
    incarnation   uuid not null,                        -- one per process start
    outbox        text not null references mailboat.outboxes,
    address       text not null default '',             -- of its HTTP server
    serves        bigint[] not null default '{}',       -- subscriptions it is configured for
    session_lock  boolean not null,                     -- holds its liveness lock; false behind a pooler
    beat_at       timestamptz not null,
    expires_at    timestamptz not null,
    started_at    timestamptz not null default now()
) with (fillfactor = 50);

-- Relays that currently request NOTIFY. Writers never read this table (see mailboat.notify_on_insert).
create table mailboat.wakeup_requests (
    relay   text primary key,
    outbox  text not null,
    active  boolean not null
) with (fillfactor = 10);

-- One row per EventSubscription.
create table mailboat.subscriptions (
    id                     bigint generated always as identity primary key,
    outbox                 text not null references mailboat.outboxes,
    name                   text not null,               -- namespace/name of the resource
    uid                    text not null default '',    -- of the resource in its last declaration
    state                  text not null default 'Running' check (state in ('Running', 'Paused')),
    declared_state         text not null default 'Running',  -- in the last manifest; a change of it sets `state`
    paused_reason          text,
    partitions             integer not null check (partitions between 1 and 256),
    generation             integer not null default 1,  -- of the partition layout; sequence numbers restart with it
    since_time             timestamptz,                 -- start.from: Time
    since_id               bigint,                      -- start.from: Position
    assignment_generation  bigint not null default 0,
    config_version         bigint not null default 0,   -- newest configuration that named it; older ones change nothing
    declared_by            text not null default '',    -- uid of the OutboxRelay that the subscription belongs to
    retired_at             timestamptz,                 -- its resource was deleted; progress is kept for 24 hours
    created_at             timestamptz not null default now(),
    unique (outbox, name)
);

-- Progress: one small row per (subscription, partition). docs/windows.md explains the snapshots and the position.
create table mailboat.cursors (
    subscription_id     bigint not null references mailboat.subscriptions on delete cascade,
    partition           integer not null,
    settled_snapshot    pg_snapshot not null,           -- P: everything visible in it is settled
    window_snapshot     pg_snapshot,                    -- C: end of the open window; null: no window is open
    lowest              bigint,                         -- ids of a large window; null: the window is small
    highest             bigint,
    position            bigint not null default 0,      -- within the window: settled up to this id
    highest_settled_id  bigint not null default 0,      -- of all windows; `mailboat rebase` continues there
    sequence            bigint not null default 0,      -- of the last settled event
    crash_count         integer not null default 0,     -- crashes at this position; at most 1 while no window is open
    suspect_until       bigint,                         -- up to this id, a pull returns one event or group at a time
    previous_layout     jsonb,                          -- cursors of the previous layout, while it has unsettled events
    owner               text,
    epoch               uuid,                           -- new with every change of owner
    released            boolean not null default true,  -- by the last owner, not by expiry of its lease
    assigned_to         text,                           -- the relay that should own it, by the operator's assignment
    system_identifier   bigint not null,
    timeline            integer not null,
    database_oid        oid not null default mailboat.database_oid(),
    primary key (subscription_id, partition)
) with (fillfactor = 10);  -- a version on another page needs new index entries, and the unique index checks all former versions

-- Relays find the cursors of their leases by epoch. Updates of progress do not change it and stay within their page.
create unique index cursors_epoch on mailboat.cursors (epoch) where epoch is not null;

-- Events that wait for their next attempt after a failure, and later events of the same key behind them. Each row has the whole
-- event, so retention of the outbox does not affect it.
create table mailboat.parked (
    subscription_id      bigint not null references mailboat.subscriptions on delete cascade,
    ordinal              bigint generated always as identity,
    partition            integer not null,
    unit                 bigint,                        -- events handled in one transaction or not at all; null: alone
    rank                 integer not null default 1,    -- 0: replayed, before all others of its key
    attempts             integer not null default 0,
    next_attempt_at      timestamptz,                   -- null: waits behind its key's head, or blocked
    blocked              boolean not null default false,  -- attempts are used up and onExhausted is Block
    suspect              boolean not null default false,  -- relays died while it was in flight: count the attempt first
    pending_dead_letter  boolean not null default false,  -- given up; the dead-letter topic has not accepted it yet
    replay               boolean not null default false,
    sequence             bigint not null,
    first_failed_at      timestamptz,
    last_failed_at       timestamptz,
    reason               text,
    last_error           text,
    id                   bigint not null,
    event_id             uuid not null,
    event_type           text not null,
    aggregate_type       text,
    aggregate_id         text,
    key                  text,
    payload              bytea,
    content_type         text not null,
    headers              jsonb,
    tags                 text[] not null default '{}',
    traceparent          text,
    created_at           timestamptz not null,
    slot                 integer not null,
    parked_at            timestamptz not null default clock_timestamp(),
    series_partition     integer,                       -- partition in which `sequence` was assigned
    series_generation    integer,                       -- its generation; repartitioning changes neither of the two
    primary key (subscription_id, ordinal)
);

create index parked_due on mailboat.parked (subscription_id, partition, next_attempt_at) where next_attempt_at is not null;
-- The queue of a key is found by a hash of the key, because a long key does not fit into an index.
create index parked_queue on mailboat.parked (subscription_id, partition, mailboat.key_slot(key, 0), rank, ordinal);
create index parked_event on mailboat.parked (subscription_id, event_id);

-- Events without attempts left, or refused.
create table mailboat.dead_letters (
    dead_id            bigint generated always as identity primary key,
    subscription_id    bigint not null references mailboat.subscriptions on delete cascade,
    partition          integer not null,
    attempts           integer not null,
    sequence           bigint not null,
    reason             text not null,
    last_error         text not null,
    first_failed_at    timestamptz not null,
    last_failed_at     timestamptz not null,
    died_at            timestamptz not null default clock_timestamp(),
    replayed_at        timestamptz,
    id                 bigint not null,
    event_id           uuid not null,
    event_type         text not null,
    aggregate_type     text,
    aggregate_id       text,
    key                text,
    payload            bytea,
    content_type       text not null,
    headers            jsonb,
    tags               text[] not null default '{}',
    traceparent        text,
    created_at         timestamptz not null,
    slot               integer not null,
    series_partition   integer,
    series_generation  integer
);
create index dead_letters_subscription on mailboat.dead_letters (subscription_id, dead_id) where replayed_at is null;

-- The manifest of a pull subscription, with all that a consumer in any language needs. Written by `mailboat migrate`, by relays
-- and by the Python kit whenever they read the manifest.
create table mailboat.pull_policies (
    subscription_id       bigint primary key references mailboat.subscriptions on delete cascade,
    columns               jsonb not null,               -- Mailboat's name of a column -> the table's name, where they differ
    event_types           text[],                       -- LIKE patterns; null: all
    aggregate_types       text[],
    tags_all              text[],
    tags_any              text[],
    tags_none             text[],
    ordered               boolean not null,             -- ordering: Key
    batch_size            integer not null check (batch_size > 0),
    group_by              text[] not null,              -- headers or tags, or {transaction}; empty: no groups
    max_group             integer not null check (max_group > 0),
    max_attempts          integer not null check (max_attempts > 0),
    backoff_initial       double precision not null,    -- seconds; so is backoff_max
    backoff_factor        double precision not null,
    backoff_max           double precision not null,
    backoff_jitter        double precision not null,
    block_when_exhausted  boolean not null,             -- onExhausted: Block
    emit_dead_letters     boolean not null,             -- sink.pull.emitDeadLetters
    no_handler            text not null                 -- for kits: DeadLetter or Ignore
);

-- Heartbeats of applications that pull events. Writers notify while one of them is idle.
create table mailboat.consumers (
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    instance         text not null,
    outbox           text not null,
    beat_at          timestamptz not null,
    idle_until       timestamptz not null,
    primary key (subscription_id, instance)
) with (fillfactor = 50);

-- Refusals of events that no cursor has passed yet. The consumer's transaction was rolled back, so the event is still in its
-- window. The next pull finds the refusal, parks the event and deletes the row.
create table mailboat.refusals (
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    event_id         uuid not null,
    failures         integer not null,                  -- attempts that count
    returns          integer not null,                  -- pulls that ended with a refusal, so not by a crash
    due_at           timestamptz,                       -- null: at once
    final            boolean not null,                  -- no further attempt
    reason           text,
    error            text,
    first_at         timestamptz not null default clock_timestamp(),
    last_at          timestamptz not null default clock_timestamp(),
    primary key (subscription_id, event_id)
);

-- Roles that may pull a subscription, or mark events as handled under a name.
create table mailboat.consumer_grants (
    consumer  text not null,                            -- a subscription, or a name used with mailboat.once
    outbox    text not null,                            -- of the subscription; empty: the name is not a subscription
    role      name not null,
    primary key (consumer, outbox, role)
);

-- Events that mailboat.once has marked as handled.
create table mailboat.handled (
    consumer    text not null,
    event_id    uuid not null,
    handled_at  timestamptz not null default clock_timestamp(),
    primary key (consumer, event_id)
);
create index handled_age on mailboat.handled (consumer, handled_at);

-- Consumers behind a broker with an inbox: the events that each process is handling. If a row expired, its process died, and one
-- more attempt is counted for its events.
create table mailboat.inbox_holders (
    consumer     text not null,
    instance     text not null,
    incarnation  text not null,                         -- of one process; ascending within an instance
    expires_at   timestamptz not null,
    running      uuid[] not null,
    primary key (consumer, instance, incarnation)
) with (fillfactor = 50);

-- Events of such consumers that failed or crashed a process, until they are handled. Dead letters stay until they are pruned.
create table mailboat.inbox_attempts (
    consumer    text not null,
    event_id    uuid not null,
    attempts    integer not null,
    deaths      integer not null,                       -- attempts that ended in a crash of the process
    due_at      timestamptz,                            -- null: at once
    dead        boolean not null default false,
    changed_at  timestamptz not null default clock_timestamp(),
    primary key (consumer, event_id)
);
create index inbox_attempts_age on mailboat.inbox_attempts (consumer, changed_at);
