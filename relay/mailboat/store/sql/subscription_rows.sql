-- Subscriptions as the store knows them, and how far behind they are.

-- name: find
-- `given_up`: its resource was deleted, and the time for which its progress is kept is over.
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
-- The state in the table is the truth while a relay runs; what the resource declares wins when it changes.
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
-- Waits for whoever settles or replays just now. In a statement of its own: only a later one sees what they have parked.
select from mailboat.cursors where subscription_id = %(id)s order by partition for update

-- name: clear
-- Cursors and parked events go, the cursors being held. Dead letters stay, for a person.
with cursors as (delete from mailboat.cursors where subscription_id = %(id)s)
delete from mailboat.parked where subscription_id = %(id)s

-- name: renew
-- A resource of the same name, created after the progress of the old one was deleted: it has no progress.
update mailboat.subscriptions
set uid = %(uid)s, state = %(state)s, declared_state = %(state)s, paused_reason = null, partitions = %(partitions)s,
    generation = generation + 1, since_time = %(since_time)s::timestamptz, since_id = %(since_id)s, assignment_generation = 0,
    config_version = %(version)s, declared_by = %(relay_uid)s, retired_at = null
where id = %(id)s

-- name: gone
-- Subscriptions of this OutboxRelay that its configuration does not name any more, and whether another relay, which has an
-- older one, still moves them.
select s.id, s.name,
       exists (select from mailboat.relays as r
               where r.id <> %(relay)s and s.id = any (r.serves))
from mailboat.subscriptions as s
where s.outbox = %(outbox)s and s.declared_by = %(relay_uid)s and s.declared_by <> '' and s.retired_at is null
  and s.config_version <= %(version)s and s.name <> all (%(names)s)

-- name: retire
-- Progress and parked events are kept for a grace time: a resource that is created again continues. Dead letters stay for a
-- person, and the row with them: it also tells relays with an older configuration that there is nothing to declare.
update mailboat.subscriptions
set retired_at = clock_timestamp(), config_version = %(version)s
where id = %(id)s and declared_by = %(relay_uid)s and config_version <= %(version)s and retired_at is null
returning id

-- name: disown
-- A relay that still has a batch of it in flight settles nothing any more. The cursors are locked before.
update mailboat.cursors set owner = null, epoch = null, released = true where subscription_id = %(id)s

-- name: given_up
-- Deleted subscriptions whose grace time is over and which have progress or parked events left.
select s.id, s.name
from mailboat.subscriptions as s
where s.outbox = %(outbox)s and s.retired_at < clock_timestamp() - make_interval(secs => %(grace)s)
  and (exists (select from mailboat.cursors as c where c.subscription_id = s.id)
       or exists (select from mailboat.parked as p where p.subscription_id = s.id))

-- name: hold_given_up
-- In a transaction: it may have been declared again meanwhile.
select id
from mailboat.subscriptions
where id = %(id)s and retired_at < clock_timestamp() - make_interval(secs => %(grace)s)
for no key update

-- name: in_other_hands
-- Whether another relay, alive, holds partitions of a subscription that is about to be repartitioned.
select exists (
    select
    from mailboat.subscriptions as s
    join mailboat.cursors as c on c.subscription_id = s.id
    join mailboat.relays as r on r.id = c.owner
    where s.outbox = %(outbox)s and s.name = %(name)s and s.partitions <> %(partitions)s and s.config_version <= %(version)s
      and r.id <> %(relay)s)

-- name: forget
-- Cursors, parked events and dead letters go with it.
delete from mailboat.subscriptions where outbox = %(outbox)s and name = %(name)s
returning id

-- name: create_cursors
-- A new subscription starts before everything, or now. What is skipped counts as settled: a rebase must not bring it back.
insert into mailboat.cursors (subscription_id, partition, settled_snapshot, highest_settled_id, system_identifier, timeline)
select %(id)s, partition, case when %(latest)s then pg_current_snapshot() else '3:3:'::pg_snapshot end,
       case when %(latest)s then coalesce((select max(e.id) from {rows} as e), 0) else 0 end,
       %(system_identifier)s, %(timeline)s
from generate_series(0, %(partitions)s - 1) as partition
on conflict do nothing

-- name: set_state
-- The same as pausing or resuming by hand.
update mailboat.subscriptions
set state = %(state)s, paused_reason = %(reason)s
where outbox = %(outbox)s and name = %(name)s
returning id

-- name: strangers
-- Cursors that were written in another database system, or in another database of this one: this is a restored copy.
select distinct s.name
from mailboat.cursors as c
join mailboat.subscriptions as s on s.id = c.subscription_id
where s.id = any (%(numbers)s)
  and (c.system_identifier <> %(system_identifier)s or c.database_oid <> mailboat.database_oid())

-- name: probe_at_most
-- For this transaction only. A probe that waits for somebody's lock, or reads for too long, is given up by the server as well.
select set_config('statement_timeout', %(patience)s, true)

-- name: backlog
-- Matching events that are not settled, by partition: the same two arms as the tail, from the oldest cursor on, bounded.
-- Counted as they come, by what a filter looks at and nothing else: kept for a second look they would fill temporary files,
-- payloads and all, with every probe. Where counting stopped each partition says so, also one that had none among the events
-- looked at: the next one may be its own. (`offset 0`: whether an event waits is worked out once, not once per column.)
with mine as materialized (
    select partition, settled_snapshot, window_snapshot, position, previous_layout
    from mailboat.cursors
    where subscription_id = %(subscription)s
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
