-- Going on with a restored copy of a database, on request.

-- name: readopt
-- Transaction ids of the old system mean nothing here; some even lie ahead. Every restored event becomes older than all.
update {outbox} as e
set xid = '3'::xid8
where e.xid >= pg_snapshot_xmin(pg_current_snapshot())

-- name: span
select pg_current_snapshot()::text, max(e.id) from {outbox} as e

-- name: rebase
-- Cursors of another system continue behind the highest id that they settled, up to now, by id.
update mailboat.cursors as c
set done = case when %(highest)s::bigint > c.hi then '3:3:'::pg_snapshot else %(upto)s::pg_snapshot end,
    upto = case when %(highest)s::bigint > c.hi then %(upto)s::pg_snapshot end,
    lowest = case when %(highest)s::bigint > c.hi then c.hi + 1 end,
    highest = case when %(highest)s::bigint > c.hi then %(highest)s::bigint end,
    position = case when %(highest)s::bigint > c.hi then c.hi else 0 end,
    debts = null, resumes = 0, owner = null, epoch = null, released = true, assigned_to = null,
    system_identifier = %(system_identifier)s, timeline = %(timeline)s
from mailboat.subscriptions as s
where s.id = c.subscription_id and s.outbox = %(outbox)s and c.system_identifier <> %(system_identifier)s
returning c.subscription_id

-- name: forget_relays
-- They served the other system.
with gone as (delete from mailboat.doorbells where outbox = %(outbox)s)
delete from mailboat.relays where outbox = %(outbox)s and expires_at < clock_timestamp()
