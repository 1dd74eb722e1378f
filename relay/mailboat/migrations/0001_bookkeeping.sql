-- The tables in which relays keep their progress. One schema, `mailboat`, whatever the outbox tables are called.

create schema if not exists mailboat;

comment on schema mailboat is 'Mailboat: transactional outbox and the progress of its relays. Managed by `mailboat migrate`.';

-- Which tables are outboxes. `mailboat.create_outbox` (0002) adds one.
create table mailboat.outboxes (
    name        text primary key,                       -- schema-qualified, as to_regclass understands it
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

-- Who wants to be woken by NOTIFY just now. Writers look here (see mailboat.ring), so it is tiny and apart.
create table mailboat.doorbells (
    relay   text primary key,
    outbox  text not null,
    rings   boolean not null
) with (fillfactor = 10, vacuum_truncate = off);        -- truncating would lock out the writers that look

create table mailboat.subscriptions (
    id              bigint generated always as identity primary key,
    outbox          text not null references mailboat.outboxes,
    name            text not null,                      -- namespace/name of the resource
    uid             text not null default '',           -- of the resource: a re-created one starts anew
    state           text not null default 'Running' check (state in ('Running', 'Paused')),
    declared_state  text not null default 'Running',    -- what the resource said last; a change of it wins
    paused_reason   text,
    partitions      integer not null check (partitions between 1 and 256),
    generation      integer not null default 1,         -- of the partition layout; sequence numbers start anew with it
    since_time      timestamptz,                        -- start.from: Time
    since_id        bigint,                             -- start.from: Position
    assignment_generation bigint not null default 0,
    created_at      timestamptz not null default now(),
    unique (outbox, name)
);

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
    resumes          integer not null default 0,        -- how often a relay died at this very position
    debts            jsonb,                             -- what older partitions left undone (see repartition)
    owner            text,
    epoch            uuid,                              -- a new one with every change of owner
    released         boolean not null default true,     -- the last owner let go by itself
    assigned_to      text,                              -- who should own it, if anybody outside said so
    system_identifier bigint not null,
    timeline         integer not null,
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
    primary key (subscription_id, ordinal)
);
create index parked_key on mailboat.parked (subscription_id, partition, key, rank, ordinal);
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
    slot             integer not null
);
create index dead_letters_subscription on mailboat.dead_letters (subscription_id, dead_id) where replayed_at is null;

-- Whether cursors of an earlier layout (`debts`: the number of partitions, and the cursor of each) have settled an event.
-- A cursor whose layout was itself not finished carries the debts of the one before.
create function mailboat.settled_before(debts jsonb, slot integer, xid xid8, id bigint) returns boolean
    language plpgsql stable strict parallel safe
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
