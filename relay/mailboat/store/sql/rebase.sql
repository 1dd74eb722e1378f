-- Adoption of cursors that were written in another database system (`mailboat rebase`).

-- name: cursors
-- Lock all cursors of the outbox, and return for each whether it was written in another system or database.
select c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid()
from mailboat.cursors as c
join mailboat.subscriptions as s on s.id = c.subscription_id
where s.outbox = %(outbox)s
order by c.subscription_id, c.partition
for no key update of c

-- name: reset_xids
-- Transaction ids of the old system have no meaning here, and some lie ahead of this system's. Events with such an id get the
-- transaction id 3, which is older than every snapshot.
update {outbox} as e
set xid = '3'::xid8
where e.xid >= pg_snapshot_xmin(pg_current_snapshot())

-- name: span
select pg_current_snapshot()::text, max(e.id) from {rows} as e

-- name: rebase
-- Each cursor continues after the highest id that it settled, up to the current snapshot, in the order of ids. This includes
-- cursors of this system (of a subscription that was created in the copy): for them, a readopted event is older than their
-- snapshots and would be skipped.
update mailboat.cursors as c
set settled_snapshot = case when %(highest)s::bigint > c.highest_settled_id then '3:3:'::pg_snapshot
                            else %(window_snapshot)s::pg_snapshot end,
    window_snapshot = case when %(highest)s::bigint > c.highest_settled_id then %(window_snapshot)s::pg_snapshot end,
    lowest = case when %(highest)s::bigint > c.highest_settled_id then c.highest_settled_id + 1 end,
    highest = case when %(highest)s::bigint > c.highest_settled_id then %(highest)s::bigint end,
    position = case when %(highest)s::bigint > c.highest_settled_id then c.highest_settled_id else 0 end,
    previous_layout = null, crash_count = 0, owner = null, epoch = null, released = true, assigned_to = null,
    system_identifier = %(system_identifier)s, timeline = %(timeline)s, database_oid = mailboat.database_oid()
from mailboat.subscriptions as s
where s.id = c.subscription_id and s.outbox = %(outbox)s
returning c.subscription_id

-- name: history
-- Evidence that this system continues the history of the one that wrote the cursors. Columns: the number of other systems;
-- whether this system's transaction ids are behind; the number of events examined; the number of those that were not written by
-- the transaction that their xid names. Examined are events that cursors may have settled, up to 100 below each cursor's place,
-- by transaction and by id.
-- pg_upgrade leaves rows unchanged, including xmin; a restored row has the xmin of the restore. xmin has 32 bits. An xid of 3 was
-- assigned by `reset_xids`, and is older than every snapshot.
with strangers as materialized (
    select c.highest_settled_id, pg_snapshot_xmax(coalesce(c.window_snapshot, c.settled_snapshot)) as xmax, c.system_identifier
    from mailboat.cursors as c
    join mailboat.subscriptions as s on s.id = c.subscription_id
    where s.outbox = %(outbox)s
      and (c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid())
),
events as materialized (
    select e.xid, e.xmin
    from (select distinct xmax from strangers) as place
    cross join lateral (
        select e.{xid} as xid, e.xmin from {outbox} as e where e.{xid} < place.xmax order by e.{xid} desc limit 100
    ) as e
    union all
    select e.xid, e.xmin
    from (select distinct highest_settled_id from strangers) as place
    cross join lateral (
        select e.{xid} as xid, e.xmin from {outbox} as e where e.{id} <= place.highest_settled_id order by e.{id} desc limit 100
    ) as e
)
select (select count(distinct system_identifier) from strangers),
       exists (select from strangers where xmax > pg_snapshot_xmax(pg_current_snapshot())),
       (select count(*) from events),
       (select count(*) from events where xid > '3'::xid8 and xmin::text::bigint <> xid::text::numeric %% 4294967296)

-- name: keep
-- Adopt cursors unchanged. Adopted cursors have no owner: a relay that did not release its cursors stopped with the old system.
update mailboat.cursors as c
set owner = null, epoch = null, system_identifier = %(system_identifier)s, timeline = %(timeline)s,
    database_oid = mailboat.database_oid()
from mailboat.subscriptions as s
where s.id = c.subscription_id and s.outbox = %(outbox)s
  and (c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid())
returning c.subscription_id

-- name: forget_relays
-- Delete the relays of the other system.
with gone as (delete from mailboat.wakeup_requests where outbox = %(outbox)s)
delete from mailboat.relays where outbox = %(outbox)s
