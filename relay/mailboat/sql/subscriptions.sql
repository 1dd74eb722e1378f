-- Subscriptions as the store knows them, and how far behind they are.

-- name: find
select id, uid, partitions, generation, state, since_time::text, since_id
from mailboat.subscriptions
where outbox = %(outbox)s and name = %(name)s
for no key update

-- name: declare
insert into mailboat.subscriptions (outbox, name, uid, state, declared_state, partitions, since_time, since_id)
values (%(outbox)s, %(name)s, %(uid)s, %(state)s, %(state)s, %(partitions)s, %(since_time)s::timestamptz, %(since_id)s)
on conflict (outbox, name) do nothing

-- name: redeclare
-- The state in the table is the truth while a relay runs; what the resource declares wins when it changes.
update mailboat.subscriptions
set uid = %(uid)s,
    state = case when declared_state = %(state)s then state else %(state)s end,
    paused_reason = case when declared_state = %(state)s then paused_reason end,
    declared_state = %(state)s
where id = %(id)s and (uid, declared_state) is distinct from (%(uid)s, %(state)s)

-- name: forget
-- Cursors, parked events and dead letters go with it.
delete from mailboat.subscriptions where outbox = %(outbox)s and name = %(name)s
returning id

-- name: create_cursors
-- A new subscription starts before everything, or now. What is skipped counts as settled: a rebase must not bring it back.
insert into mailboat.cursors (subscription_id, partition, done, hi, system_identifier, timeline)
select %(id)s, partition, case when %(latest)s then pg_current_snapshot() else '3:3:'::pg_snapshot end,
       case when %(latest)s then coalesce((select max(e.id) from (select {stored} from {outbox} as e) as e), 0) else 0 end,
       %(system_identifier)s, %(timeline)s
from generate_series(0, %(partitions)s - 1) as partition
on conflict do nothing

-- name: states
-- What relays look up at every heartbeat.
select id, name, partitions, generation, state = 'Paused'
from mailboat.subscriptions
where id = any (%(numbers)s)

-- name: set_state
-- The same as pausing or resuming by hand.
update mailboat.subscriptions
set state = %(state)s, paused_reason = %(reason)s
where outbox = %(outbox)s and name = %(name)s
returning id

-- name: strangers
-- Cursors that were written in another database system: this is a restored copy.
select distinct s.name
from mailboat.cursors as c
join mailboat.subscriptions as s on s.id = c.subscription_id
where s.id = any (%(numbers)s) and c.system_identifier <> %(system_identifier)s

-- name: due
-- Partitions that have a parked event whose time has come.
select distinct subscription_id, partition
from mailboat.parked
where subscription_id = any (%(numbers)s) and next_attempt_at <= clock_timestamp()

-- name: backlog
-- Matching events that are not settled, by partition: the same two arms as the tail, from the oldest cursor on, bounded.
with mine as materialized (
    select partition, done, upto, position, debts
    from mailboat.cursors
    where subscription_id = %(subscription)s
),
edge as materialized (
    select min(pg_snapshot_xmax(done)::text::numeric)::text::xid8 as xmax from mine
),
seen as materialized (
    select e.*
    from (
        select {stored}
        from {outbox} as e
        where e.xid = any (array(select distinct pg_snapshot_xip(done) from mine))
          and e.xid < (select xmax from edge)
        union all
        select {stored}
        from {outbox} as e
        where e.xid >= (select xmax from edge)
        limit %(bound)s
    ) as e
)
select mine.partition, count(*), extract(epoch from clock_timestamp() - min(found.created_at))::float8,
       (select count(*) from seen) >= %(bound)s
from seen as found
join mine on mine.partition = found.slot %% %(partitions)s
where not pg_visible_in_snapshot(found.xid, mine.done)
  and not coalesce(pg_visible_in_snapshot(found.xid, mine.upto) and found.id <= mine.position, false)
  and not coalesce(mailboat.settled_before(mine.debts, found.slot, found.xid, found.id), false)
  and {wanted}
group by mine.partition

-- name: parked
select partition, count(*) from mailboat.parked where subscription_id = %(subscription)s group by partition

-- name: dead
select count(*)
from (select from mailboat.dead_letters
      where subscription_id = %(subscription)s and replayed_at is null
      limit %(bound)s) as bounded
