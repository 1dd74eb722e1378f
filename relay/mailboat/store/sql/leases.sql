-- Ownership of partitions. mailboat/delivery/rebalance.py decides which relay should own which.

-- name: join
-- Register a relay. The row of an earlier process with the same id is replaced.
insert into mailboat.relays (id, incarnation, outbox, address, serves, session_lock, beat_at, expires_at)
values (%(relay)s, %(incarnation)s, %(outbox)s, %(address)s, %(serves)s, %(session_lock)s,
        clock_timestamp(), clock_timestamp() + make_interval(secs => %(ttl)s))
on conflict (id) do update
set incarnation = excluded.incarnation, outbox = excluded.outbox, address = excluded.address, serves = excluded.serves,
    session_lock = excluded.session_lock, beat_at = excluded.beat_at, expires_at = excluded.expires_at, started_at = now()

-- name: inherit
-- Clear the owner of cursors that an earlier process of the same id held when it died. The next claim counts a crash.
update mailboat.cursors as c
set owner = null
where c.owner = %(relay)s
  and not exists (
      select from mailboat.relays as r
      where r.id = %(relay)s and r.incarnation = %(incarnation)s)

-- name: release_unserved
-- Release cursors that an earlier session of this process held and that this session does not serve. Other relays can claim them
-- at once.
update mailboat.cursors
set owner = null, epoch = null, released = true
where owner = %(relay)s and subscription_id <> all (%(serves)s)

-- name: beat
-- Renew all leases of this relay and return the state of ownership, in one round trip. If the relay was declared dead, return no
-- row.
-- Columns: all relays of the outbox; the owners of the cursors; the subscriptions; the partitions with a parked event that is
-- due; whether all cursors were found by their epochs. If one is missing, because it has another epoch or none, all are read by
-- subscription, which passes the former versions that an old snapshot keeps. The difference of a relay's two times is the length of its leases, independent of the clock. The times of this relay are
-- those before the renewal.
with renewed as (
    update mailboat.relays
    set beat_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(ttl)s), serves = %(serves)s
    where id = %(relay)s and incarnation = %(incarnation)s
    returning id
),
known as materialized (
    select subscription_id, partition, owner, assigned_to from mailboat.cursors where epoch = any (%(epochs)s::uuid[])
),
search as materialized (
    select (select count(*) from known where subscription_id = any (%(delivered)s))
           is not distinct from (select sum(partitions) from mailboat.subscriptions where id = any (%(delivered)s)) as complete
),
found as (
    select subscription_id, partition, owner, assigned_to, null::uuid as epoch
    from known
    where subscription_id = any (%(delivered)s) and (select complete from search)
    union all
    select subscription_id, partition, owner, assigned_to, epoch
    from mailboat.cursors
    where subscription_id = any (%(delivered)s) and not (select complete from search)
)
select (select json_agg(json_build_array(r.id, r.incarnation, r.beat_at::text, extract(epoch from r.expires_at - r.beat_at), r.serves,
                                         r.session_lock) order by r.id)
        from mailboat.relays as r
        where r.outbox = %(outbox)s),
       (select json_agg(json_build_array(c.subscription_id, c.partitions, c.owners, c.assigned, c.epochs))
        from (select subscription_id, array_agg(partition order by partition) as partitions,
                     array_agg(owner order by partition) as owners, array_agg(assigned_to order by partition) as assigned,
                     array_agg(epoch order by partition) as epochs
              from found
              group by subscription_id) as c),
       (select json_agg(json_build_array(s.id, s.name, s.partitions, s.generation, s.state = 'Paused'))
        from mailboat.subscriptions as s
        where s.id = any (%(serves)s)),
       (select json_agg(distinct jsonb_build_array(p.subscription_id, p.partition))
        from mailboat.parked as p
        where p.subscription_id = any (%(serves)s) and p.next_attempt_at <= clock_timestamp()),
       (select complete from search)
from renewed

-- name: leave
-- Deregister a relay that drained before it stopped. Its peers need not wait until its lease expires.
with gone as (delete from mailboat.wakeup_requests where relay = %(relay)s)
delete from mailboat.relays where id = %(relay)s and incarnation = %(incarnation)s

-- name: lock
-- Acquire the liveness lock of a relay, until the session ends.
select pg_try_advisory_lock(%(high)s::integer, %(low)s::integer)

-- name: lock_holder
-- The session that holds the liveness lock, and whether another process with this relay's id is alive.
select coalesce((select format('process %%s, user %%s, application %%s', l.pid, a.usename, a.application_name)
                 from pg_locks as l left join pg_stat_activity as a on a.pid = l.pid
                 where l.locktype = 'advisory' and l.classid::bigint = %(high)s::bigint & 4294967295
                   and l.objid::bigint = %(low)s::bigint & 4294967295 and l.objsubid = 2 and l.granted
                   and l.database = (select oid from pg_database where datname = current_database())
                 limit 1), 'no session any more'),
       exists (select from mailboat.relays
               where id = %(relay)s and incarnation <> %(incarnation)s and expires_at > clock_timestamp())

-- name: expire
-- Expire a dead relay, and with it all its leases. A relay is dead if its lease expired, or if it has been silent for a moment
-- and its liveness lock is free. If it has sent another heartbeat in the meantime, change nothing.
with death as materialized (
    select %(expired)s or pg_try_advisory_xact_lock(%(high)s::integer, %(low)s::integer) as is_dead
),
gone as (
    delete from mailboat.relays
    where id = %(relay)s and incarnation = %(incarnation)s and beat_at = %(at)s::timestamptz and (select is_dead from death)
    returning id
),
wakeup as (
    delete from mailboat.wakeup_requests where relay in (select id from gone)
)
select id from gone

-- name: claim
-- Acquire cursors without a live owner. The new epoch voids the batches that the last owner still has in flight.
-- Locked rows are skipped: a relay that vanished may have left a transaction open until the server ends it, and a relay that
-- waited for that transaction could not renew its own leases. Cursors of a subscription that was repartitioned since this relay's
-- last poll are skipped too: the relay would route events by the old number of partitions.
-- If the subscription was paused, or the last owner released the cursor (`released`), no event was in flight, and no crash is
-- counted. If the last owner died without an open window, the crash may belong to the next window: it is kept until one is
-- opened.
with free as materialized (
    select c.subscription_id, c.partition, s.state = 'Paused' as paused
    from mailboat.cursors as c
    join unnest(%(subscriptions)s::bigint[], %(partitions)s::integer[], %(generations)s::integer[])
         as w (subscription_id, partition, generation)
      on c.subscription_id = w.subscription_id and c.partition = w.partition
    join mailboat.subscriptions as s on s.id = w.subscription_id and s.generation = w.generation
    where c.owner is null
       or c.owner = %(relay)s
       or not exists (select from mailboat.relays as r where r.id = c.owner)
    for no key update of c skip locked
)
update mailboat.cursors as c
set owner = %(relay)s,
    epoch = gen_random_uuid(),
    released = false,
    crash_count = case
        when c.released or c.owner = %(relay)s or free.paused then c.crash_count
        when c.window_snapshot is null then 1
        else c.crash_count + 1
    end
from free
where c.subscription_id = free.subscription_id and c.partition = free.partition
returning c.subscription_id, c.partition, c.epoch::text, c.settled_snapshot::text, c.window_snapshot::text, c.lowest, c.highest,
          c.position, c.sequence, c.crash_count, c.previous_layout is not null

-- name: renew
-- Give cursors of this relay a new epoch, without a change of owner. They are found by their current epoch: while a snapshot is
-- held, that lookup passes only the versions since that epoch began. As after a claim, `released` is false: the next worker may
-- have events in flight.
update mailboat.cursors as c
set epoch = gen_random_uuid(), released = false
where c.epoch = any (%(epochs)s::uuid[])
returning c.subscription_id, c.partition, c.epoch::text, c.settled_snapshot::text, c.window_snapshot::text, c.lowest, c.highest,
          c.position, c.sequence, c.crash_count, c.previous_layout is not null

-- name: release
-- Release a drained cursor: the next owner can claim it at once and counts no crash.
update mailboat.cursors as c
set owner = null, epoch = null, released = true
where c.epoch = any (%(epochs)s::uuid[])

-- name: accept
-- Accept an assignment of the operator. An older generation is refused. The same generation is accepted again, because every
-- relay stores it.
update mailboat.subscriptions
set assignment_generation = %(generation)s
where id = %(subscription)s and assignment_generation <= %(generation)s
returning id

-- name: assign
-- Store the assigned owner of one cursor. One cursor per transaction: an update of several, in any order, would deadlock with the
-- ticks of their owners. If a newer generation was accepted, nothing is written. If not, the lock on the subscription delays a
-- newer generation until this owner is committed.
with valid as (
    select id
    from mailboat.subscriptions
    where id = %(subscription)s and assignment_generation = %(generation)s
    for share
)
update mailboat.cursors as c
set assigned_to = %(relay)s
from valid
where c.subscription_id = valid.id and c.partition = %(partition)s and c.assigned_to is distinct from %(relay)s

-- name: request_wakeup
-- Request or stop wake-ups. Writers notify while `active` is true and the relay is alive.
insert into mailboat.wakeup_requests (relay, outbox, active)
values (%(relay)s, %(outbox)s, %(active)s)
on conflict (relay) do update set outbox = excluded.outbox, active = excluded.active
where (mailboat.wakeup_requests.outbox, mailboat.wakeup_requests.active) is distinct from (excluded.outbox, excluded.active)

-- name: horizon
-- The next transaction id. A transaction below it that is still open may not have seen the request for wake-ups.
select pg_snapshot_xmax(pg_current_snapshot())::text

-- name: undecided
-- Whether a transaction below that horizon is still open.
select pg_snapshot_xmin(pg_current_snapshot()) < %(horizon)s::text::xid8
