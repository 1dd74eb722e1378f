-- Going on in another database system, on request.

-- name: cursors
-- All cursors of the outbox, held, and whether each was written in another system or database.
select c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid()
from mailboat.cursors as c
join mailboat.subscriptions as s on s.id = c.subscription_id
where s.outbox = %(outbox)s
order by c.subscription_id, c.partition
for no key update of c

-- name: readopt
-- Transaction ids of the old system mean nothing here; some even lie ahead. Every restored event becomes older than all.
update {outbox} as e
set xid = '3'::xid8
where e.xid >= pg_snapshot_xmin(pg_current_snapshot())

-- name: span
select pg_current_snapshot()::text, max(e.id) from {rows} as e

-- name: rebase
-- Cursors continue behind the highest id that they settled, up to now, by id. Those of this system too (of a subscription that
-- was made in the copy): what was readopted looks to them as if it had always been there.
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
-- Whether this system continues the one that cursors were written in: from how many others there are, whether transaction ids
-- have not come as far yet, how many events that cursors may have settled were looked at (up to 100 below each place, by
-- transaction and by id), and how many of them were written by another transaction than they say. pg_upgrade leaves rows as they
-- are, xmin included; a restored row has the xmin of the restore. (xmin has 32 bits. An xid of 3 was given by `readopt`, and is
-- older than every snapshot.)
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
-- Cursors stay where they are. Nobody owns them: the owner died with the old system, if it did not let go.
update mailboat.cursors as c
set owner = null, epoch = null, system_identifier = %(system_identifier)s, timeline = %(timeline)s,
    database_oid = mailboat.database_oid()
from mailboat.subscriptions as s
where s.id = c.subscription_id and s.outbox = %(outbox)s
  and (c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid())
returning c.subscription_id

-- name: forget_relays
-- They served the other system.
with gone as (delete from mailboat.wakeup_requests where outbox = %(outbox)s)
delete from mailboat.relays where outbox = %(outbox)s
