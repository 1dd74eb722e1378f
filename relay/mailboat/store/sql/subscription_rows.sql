-- Rows of subscriptions, and their lag.

-- name: find
-- Lock and return a subscription. `given_up`: its resource was deleted, and the grace time of its progress is over.
select id, uid, partitions, generation, state, since_time::text, since_id, config_version, retired_at is not null,
       coalesce(retired_at < clock_timestamp() - make_interval(secs => %(grace)s), false) as given_up
from mailboat.subscriptions
where outbox = %(outbox)s and name = %(name)s
for no key update

-- name: declare
insert into mailboat.subscriptions (outbox, name, uid, state, declared_state, partitions, since_time, since_id, config_version,
                                    declared_by)
values (%(outbox)s, %(name)s, %(uid)s, %(state)s, %(state)s, %(partitions)s, %(since_time)s::timestamptz, %(since_id)s,
        %(version)s, %(relay_uid)s)
on conflict (outbox, name) do nothing

-- name: redeclare
-- Update a subscription from its manifest. A state that was set by a command stays until the manifest declares another one.
update mailboat.subscriptions
set uid = %(uid)s,
    state = case when declared_state = %(state)s then state else %(state)s end,
    paused_reason = case when declared_state = %(state)s then paused_reason end,
    declared_state = %(state)s,
    config_version = %(version)s,
    declared_by = %(relay_uid)s,
    retired_at = null
where id = %(id)s
  and (uid, declared_state, config_version, declared_by, retired_at)
      is distinct from (%(uid)s, %(state)s, %(version)s, %(relay_uid)s, null)
returning state

-- name: hold_cursors
-- Lock the cursors, which waits for settlements and replays in progress. This is a separate statement, because only a later
-- statement sees the events that they parked.
select from mailboat.cursors where subscription_id = %(id)s order by partition for update

-- name: clear
-- Delete the cursors, which the caller has locked, and the parked events. Dead letters stay for `mailboat dlq`.
with cursors as (delete from mailboat.cursors where subscription_id = %(id)s)
delete from mailboat.parked where subscription_id = %(id)s

-- name: renew
-- Reset a subscription whose resource was created again after the progress of the old one was deleted. The new one starts without
-- progress.
update mailboat.subscriptions
set uid = %(uid)s, state = %(state)s, declared_state = %(state)s, paused_reason = null, partitions = %(partitions)s,
    generation = generation + 1, since_time = %(since_time)s::timestamptz, since_id = %(since_id)s, assignment_generation = 0,
    config_version = %(version)s, declared_by = %(relay_uid)s, retired_at = null
where id = %(id)s

-- name: gone
-- Subscriptions of this OutboxRelay that its configuration does not name any more, and whether another relay, with an older
-- configuration, still serves them.
select s.id, s.name,
       exists (select from mailboat.relays as r
               where r.id <> %(relay)s and s.id = any (r.serves))
from mailboat.subscriptions as s
where s.outbox = %(outbox)s and s.declared_by = %(relay_uid)s and s.declared_by <> '' and s.retired_at is null
  and s.config_version <= %(version)s and s.name <> all (%(names)s)

-- name: retire
-- Retire a subscription. Its progress and parked events are kept for a grace time, so that a resource that is created again
-- continues. Dead letters stay, and the row with them. The row also keeps relays with an older configuration from declaring the
-- subscription again.
update mailboat.subscriptions
set retired_at = clock_timestamp(), config_version = %(version)s
where id = %(id)s and declared_by = %(relay_uid)s and config_version <= %(version)s and retired_at is null
returning id

-- name: release_cursors
-- Clear the owners of a retired subscription. A relay can't settle a batch of it that is still in flight. The caller has locked
-- the cursors.
update mailboat.cursors set owner = null, epoch = null, released = true where subscription_id = %(id)s

-- name: expired
-- Deleted subscriptions whose grace time is over and which still have progress or parked events.
select s.id, s.name
from mailboat.subscriptions as s
where s.outbox = %(outbox)s and s.retired_at < clock_timestamp() - make_interval(secs => %(grace)s)
  and (exists (select from mailboat.cursors as c where c.subscription_id = s.id)
       or exists (select from mailboat.parked as p where p.subscription_id = s.id))

-- name: lock_expired
-- Lock the row and check again, because the subscription may have been declared again in the meantime.
select id
from mailboat.subscriptions
where id = %(id)s and retired_at < clock_timestamp() - make_interval(secs => %(grace)s)
for no key update

-- name: owned_by_others
-- Whether another live relay owns partitions of a subscription that is about to be repartitioned.
select exists (
    select
    from mailboat.subscriptions as s
    join mailboat.cursors as c on c.subscription_id = s.id
    join mailboat.relays as r on r.id = c.owner
    where s.outbox = %(outbox)s and s.name = %(name)s and s.partitions <> %(partitions)s and s.config_version <= %(version)s
      and r.id <> %(relay)s)

-- name: forget
-- Delete a subscription with its cursors, parked events and dead letters.
delete from mailboat.subscriptions where outbox = %(outbox)s and name = %(name)s
returning id

-- name: create_cursors
-- Create the cursors of a new subscription. They start before all events, or at the current snapshot. Skipped events count as
-- settled, so that a rebase does not return to them.
insert into mailboat.cursors (subscription_id, partition, settled_snapshot, highest_settled_id, system_identifier, timeline)
select %(id)s, partition, case when %(latest)s then pg_current_snapshot() else '3:3:'::pg_snapshot end,
       case when %(latest)s then coalesce((select max(e.id) from {rows} as e), 0) else 0 end,
       %(system_identifier)s, %(timeline)s
from generate_series(0, %(partitions)s - 1) as partition
on conflict do nothing

-- name: set_state
-- Pause or resume a subscription. The manifest does not override this until its declared state changes.
update mailboat.subscriptions
set state = %(state)s, paused_reason = %(reason)s
where outbox = %(outbox)s and name = %(name)s
returning id

-- name: foreign_cursors
-- Subscriptions with cursors that were written in another database system, or in another database of this one: this database is a
-- restored copy.
select distinct s.name
from mailboat.cursors as c
join mailboat.subscriptions as s on s.id = c.subscription_id
where s.id = any (%(numbers)s)
  and (c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid())

-- name: probe_settings
-- Settings of a probe's transaction. If a probe waits for a lock or reads for too long, the server cancels it too. No bitmap scans:
-- a bitmap is built completely before the first row is returned and a limit can end the scan.
select set_config('statement_timeout', %(timeout)s, true), set_config('jit', 'off', true),
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)

-- name: backlog
-- Count matching unsettled events by partition, up to a bound: the same two arms as the tail, from the oldest cursor on.
-- Rows are counted as they are read, with only the columns that a filter needs. A materialized read would write them, with their
-- payloads, to temporary files at every probe.
-- If counting stopped at the bound, the result has a row for every partition, even for one without a match so far: the next event
-- may be its own. Cursors are found by epoch if all epochs are known: a lookup by subscription passes the former versions that an
-- old snapshot keeps. `offset 0` makes the server evaluate `waits` once per row, not once per column.
with known as materialized (
    select partition, settled_snapshot, window_snapshot, position, previous_layout
    from mailboat.cursors
    where epoch = any (%(epochs)s::uuid[])
),
mine as materialized (
    select * from known where (select count(*) from known) = %(partitions)s
    union all
    select partition, settled_snapshot, window_snapshot, position, previous_layout
    from mailboat.cursors
    where subscription_id = %(subscription)s and (select count(*) from known) <> %(partitions)s
),
edge as materialized (
    select min(pg_snapshot_xmax(settled_snapshot)::text::numeric)::text::xid8 as xmax from mine
),
counted as materialized (
    select looked_at.partition, count(*) as events, count(*) filter (where looked_at.waits) as waiting,
           min(looked_at.created_at) filter (where looked_at.waits and isfinite(looked_at.created_at)) as oldest
    from (
        select mine.partition, found.created_at,
               not pg_visible_in_snapshot(found.xid, mine.settled_snapshot)
               and not coalesce(pg_visible_in_snapshot(found.xid, mine.window_snapshot) and found.id <= mine.position, false)
               and not coalesce(mailboat.settled_before(mine.previous_layout, found.slot, found.xid, found.id), false)
               and {wanted} as waits
        from (
            select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags
            from {rows} as e
            where e.xid = any (array(select distinct pg_snapshot_xip(settled_snapshot) from mine))
              and e.xid < (select xmax from edge)
            union all
            select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags
            from {rows} as e
            where e.xid >= (select xmax from edge)
            limit %(bound)s
        ) as found
        left join mine on mine.partition = found.slot %% %(partitions)s
        offset 0
    ) as looked_at
    group by looked_at.partition
)
select mine.partition, coalesce(counted.waiting, 0), extract(epoch from clock_timestamp() - counted.oldest)::float8,
       whole.stopped
from mine
cross join (select coalesce(sum(events), 0) >= %(bound)s as stopped from counted) as whole
left join counted on counted.partition = mine.partition
where counted.waiting > 0 or whole.stopped

-- name: parked
select partition, count(*) from mailboat.parked where subscription_id = %(subscription)s group by partition

-- name: blocked
select count(*)
from (select from mailboat.parked
      where subscription_id = %(subscription)s and blocked
      limit %(bound)s) as bounded

-- name: dead
select count(*)
from (select from mailboat.dead_letters
      where subscription_id = %(subscription)s and replayed_at is null
      limit %(bound)s) as bounded
