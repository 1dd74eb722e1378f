-- Going on with a restored copy of a database, on request.

-- name: cursors
-- All cursors of the outbox, held, and whether each was written in another system.
select c.system_identifier <> %(system_identifier)s
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
set done = case when %(highest)s::bigint > c.hi then '3:3:'::pg_snapshot else %(upto)s::pg_snapshot end,
    upto = case when %(highest)s::bigint > c.hi then %(upto)s::pg_snapshot end,
    lowest = case when %(highest)s::bigint > c.hi then c.hi + 1 end,
    highest = case when %(highest)s::bigint > c.hi then %(highest)s::bigint end,
    position = case when %(highest)s::bigint > c.hi then c.hi else 0 end,
    debts = null, resumes = 0, owner = null, epoch = null, released = true, assigned_to = null,
    system_identifier = %(system_identifier)s, timeline = %(timeline)s
from mailboat.subscriptions as s
where s.id = c.subscription_id and s.outbox = %(outbox)s
returning c.subscription_id

-- name: forget_relays
-- They served the other system.
with gone as (delete from mailboat.doorbells where outbox = %(outbox)s)
delete from mailboat.relays where outbox = %(outbox)s and expires_at < clock_timestamp()
