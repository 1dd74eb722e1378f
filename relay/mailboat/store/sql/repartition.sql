-- Change of the number of partitions of a live subscription, in one transaction.

-- name: differs
-- The subscription, if its number of partitions differs from the wanted one.
select id
from mailboat.subscriptions
where outbox = %(outbox)s and name = %(name)s and retired_at is null and partitions <> %(partitions)s

-- name: server
-- Identity of the server. Snapshots of another server have no meaning here.
select pg_is_in_recovery(),
       case when pg_is_in_recovery() then null else left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) end,
       (select system_identifier from pg_control_system())

-- name: fence
-- Lock the old cursors. A concurrent transaction that updates them finds them deleted afterwards.
select jsonb_build_object('settled_snapshot', settled_snapshot::text, 'window_snapshot', window_snapshot::text,
                          'position', position, 'previous_layout', previous_layout)
from mailboat.cursors
where subscription_id = %(subscription)s
order by partition
for update

-- name: span
-- S, and the range of ids in which the cursors may have left unsettled events: the two arms of the tail, from the oldest cursor
-- on.
with old as materialized (
    select settled_snapshot from mailboat.cursors where subscription_id = %(subscription)s
),
edge as materialized (
    select min(pg_snapshot_xmax(settled_snapshot)::text::numeric)::text::xid8 as xmax from old
)
select pg_current_snapshot()::text, min(fresh.id), max(fresh.id)
from (
    select e.id
    from {rows} as e
    where e.xid = any (array(select distinct pg_snapshot_xip(settled_snapshot) from old)) and e.xid < (select xmax from edge)
    union all
    select e.id
    from {rows} as e
    where e.xid >= (select xmax from edge)
    offset 0
) as fresh

-- name: span_since
-- S, and an earlier range of ids, extended by the events that became visible since its snapshot.
select pg_current_snapshot()::text, least(min(fresh.id), %(lowest)s::bigint), greatest(max(fresh.id), %(highest)s::bigint)
from (
    select e.id
    from {rows} as e
    where e.xid = any (array(select pg_snapshot_xip(%(window_snapshot)s::pg_snapshot)))
    union all
    select e.id
    from {rows} as e
    where e.xid >= pg_snapshot_xmax(%(window_snapshot)s::pg_snapshot)
    offset 0
) as fresh

-- name: replace
-- Replace the old cursors. The new cursors first deliver the events that the old ones left unsettled up to S, in the order of
-- ids. After S, they continue like any other cursor.
-- If several old cursors end at the same transaction, the oldest is the one with the most transactions still running.
-- Cursors are deleted and inserted, never updated: `claim` (leases.sql) relies on reading a cursor together with the generation
-- of its subscription, both old or both new.
with old as (
    delete from mailboat.cursors where subscription_id = %(subscription)s
    returning settled_snapshot, highest_settled_id, system_identifier, timeline
),
oldest as (
    select settled_snapshot, max(highest_settled_id) over () as highest_settled_id, system_identifier, timeline
    from old
    order by pg_snapshot_xmax(settled_snapshot)::text::numeric, (select count(*) from pg_snapshot_xip(settled_snapshot)) desc
    limit 1
)
insert into mailboat.cursors (subscription_id, partition, settled_snapshot, window_snapshot, lowest, highest, position,
                              highest_settled_id, previous_layout, system_identifier, timeline)
select %(subscription)s, partition,
       case when %(lowest)s::bigint is null then %(window_snapshot)s::pg_snapshot else oldest.settled_snapshot end,
       case when %(lowest)s::bigint is null then null else %(window_snapshot)s::pg_snapshot end,
       %(lowest)s::bigint, %(highest)s::bigint, coalesce(%(lowest)s::bigint - 1, 0),
       coalesce(%(lowest)s::bigint - 1, oldest.highest_settled_id),
       case when %(lowest)s::bigint is null then null else %(previous_layout)s::jsonb end,
       oldest.system_identifier, oldest.timeline
from oldest, generate_series(0, %(partitions)s - 1) as partition

-- name: move_parked
update mailboat.parked set partition = slot %% %(partitions)s where subscription_id = %(subscription)s

-- name: repartition
update mailboat.subscriptions
set partitions = %(partitions)s, generation = generation + 1, assignment_generation = 0
where id = %(subscription)s
returning generation
