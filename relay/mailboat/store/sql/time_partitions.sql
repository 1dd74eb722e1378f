-- Time partitions of an outbox: created ahead of time, and dropped once no subscription needs them.

-- name: registered
-- The canonical name of the outbox, for any spelling of it.
select o.name from mailboat.outboxes o where to_regclass(o.name) = to_regclass(%(outbox)s)

-- name: now
-- The server's time, by which events are routed into time partitions. A time partition is dropped only after it ended by this
-- clock.
select clock_timestamp()

-- name: over
-- Whether a time partition has ended, so that it gets no new events. Last check before the partition is marked for dropping.
select %(upper)s::timestamptz <= clock_timestamp()

-- name: ensure
-- Create missing time partitions and return their number. Null for a plain table, which is not Mailboat's own and has no
-- partitions.
select case when exists (select from mailboat.outboxes o join pg_class c on c.oid = to_regclass(o.name)
                         where c.oid = to_regclass(%(outbox)s) and c.relkind = 'r') then null
            else mailboat.ensure_partitions(%(outbox)s) end as made

-- name: ahead
-- The number of days from now that time partitions cover, without a gap from today on. Null for a plain table.
select case when exists (select from pg_class c where c.oid = to_regclass(%(outbox)s) and c.relkind = 'r') then null
            else greatest(coalesce(extract(epoch from max(p.upper) - clock_timestamp()) / 86400, 0), 0)::float8 end
from (
    select b.upper, bool_and(b.lower is not distinct from b.previous or b.lower <= clock_timestamp())
                        over (order by b.lower) as gapless
    from (
        select m[1]::timestamptz as lower, m[2]::timestamptz as upper,
               lag(m[2]::timestamptz) over (order by m[1]::timestamptz) as previous
        from pg_inherits i join pg_class c on c.oid = i.inhrelid
        cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(.*)''\) TO \(''(.*)''\)') m
        where i.inhparent = to_regclass(%(outbox)s) and not i.inhdetachpending
    ) b
) p
where p.gapless

-- name: partitions
-- All time partitions, the oldest first. `pending`: a detach was started and not finished. `condemned`: a relay has marked it for
-- dropping.
select format('%%I.%%I', n.nspname, c.relname) as name,
       m[1]::timestamptz as lower,
       m[2]::timestamptz as upper,
       i.inhdetachpending as pending,
       obj_description(c.oid, 'pg_class') is not distinct from %(mark)s as condemned,
       coalesce(pg_total_relation_size(c.oid), 0) as bytes
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
join pg_namespace n on n.oid = c.relnamespace
cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(.*)''\) TO \(''(.*)''\)') m
where i.inhparent = to_regclass(%(outbox)s) and m is not null  -- null: dropped during this statement
order by 2

-- name: leftovers
-- Tables that a relay detached and did not drop yet. Only tables with Mailboat's mark: a partition that a user detached is not
-- dropped.
select format('%%I.%%I', n.nspname, c.relname)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r' and not c.relispartition
  and c.relnamespace = (select relnamespace from pg_class where oid = to_regclass(%(outbox)s))
  and obj_description(c.oid, 'pg_class') = %(mark)s
  and not exists (select from pg_inherits i where i.inhrelid = c.oid)
order by 1

-- name: by_index
-- Planner settings for this transaction: an existence check reads an index one entry at a time. A bitmap would first be built
-- from the whole day.
select set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true)

-- name: holders
-- Subscriptions that have not settled every event of a time partition, with the reason. The check is exact at the end of a
-- window. A comparison of xmin alone with the last transaction of the time partition would not be: one transaction that was open
-- when the last event was settled would hold the partition. An existing table may have events without a transaction id. No relay
-- reads them, so they are left out here.
with latest as materialized (
    select e.xid
    from {rows} e
    where e.created_at >= %(lower)s and e.created_at < %(upper)s and e.xid is not null
    order by e.xid desc
    limit 1
)
select s.name,
       case when bool_or(c.previous_layout is not null) then 'is being repartitioned'
            when bool_or(c.system_identifier <> v.system_identifier) then 'belongs to another database system (see `mailboat rebase`)'
            when bool_or(c.timeline <> v.timeline) then 'was not moved since a failover'
            when bool_or(s.retired_at is not null) then 'was deleted, and its progress is kept for 24 hours (`mailboat forget` ends that)'
            else 'has not delivered all of it' end
from latest l
cross join (select (select system_identifier from pg_control_system()) as system_identifier,
                   ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer as timeline) v
join mailboat.subscriptions s on s.outbox = %(outbox)s
join mailboat.cursors c on c.subscription_id = s.id
where c.previous_layout is not null
   or c.system_identifier <> v.system_identifier
   or c.timeline <> v.timeline
   or l.xid >= pg_snapshot_xmin(c.settled_snapshot) and exists (
        select from {rows} e
        where e.created_at >= %(lower)s and e.created_at < %(upper)s
          and e.xid >= pg_snapshot_xmin(c.settled_snapshot) and not pg_visible_in_snapshot(e.xid, c.settled_snapshot)
          and e.slot %% s.partitions = c.partition)
group by s.name
order by s.name

-- name: unsettled
-- The number of events of a time partition that each subscription has not settled, counted up to a bound.
select s.name, sum(n.events)::bigint
from mailboat.subscriptions s
join mailboat.cursors c on c.subscription_id = s.id
cross join lateral (
    select count(*) as events
    from (
        select from {rows} e
        where e.created_at >= %(lower)s and e.created_at < %(upper)s
          and not pg_visible_in_snapshot(e.xid, c.settled_snapshot)
          and e.slot %% s.partitions = c.partition
          and not (c.window_snapshot is not null and pg_visible_in_snapshot(e.xid, c.window_snapshot) and e.id <= c.position)
        limit %(bound)s + 1
    ) e
) n
where s.outbox = %(outbox)s
group by s.name
having sum(n.events) > 0
order by s.name

-- name: lock
-- Fails while a transaction in flight has written to the time partition. A time partition that has ended gets no new writers.
lock table {partition} in share mode

-- name: lock_timeout
-- Limit the wait for a lock. For this transaction only, because the connection may go through a pooler.
select set_config('lock_timeout', %(milliseconds)s, true)

-- name: mark
-- Mark a time partition for dropping. If the relay dies, the next one finds the mark and continues.
comment on table {partition} is {mark}

-- name: detach
-- Detach a time partition, outside of a transaction. The statement waits for transactions that use the outbox now, and blocks no
-- others.
alter table {outbox} detach partition {partition} concurrently

-- name: finish_detach
-- Finish a detach that was interrupted.
alter table {outbox} detach partition {partition} finalize

-- name: drop
-- Drop a detached table. Never an attached one: that would lock the outbox.
drop table {partition}
