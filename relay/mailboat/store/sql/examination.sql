-- Examination of an outbox: coverage by filters, and holders of old snapshots, which keep Postgres from removing dead row versions.
-- Bounded reads, no writes.

-- name: planner
-- Planner settings for the bounded reads. No bitmap scans: a bitmap is built completely before the first row is returned and a
-- limit can end the scan.
select set_config('jit', 'off', true), set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)

-- name: unmatched
-- Count, by type, the events of the last day among the newest ones (by the index on the position) that no subscription matches.
-- If the outbox has subscriptions that the caller did not name, their filters are unknown, and the result is empty.
select found.event_type, count(*)
from (
    select e.id, e.created_at, e.event_type, e.aggregate_type, e.tags from {rows} as e order by e.id desc limit %(newest)s
) as found
where found.created_at > clock_timestamp() - interval '1 day' and not {wanted}
  and not exists (select from mailboat.subscriptions as s
                  where s.outbox = %(outbox)s and s.retired_at is null and s.name <> all (%(names)s::text[]))
group by found.event_type
order by 2 desc, 1
limit %(types)s

-- name: idle
-- Subscriptions that settled no event of the last day, although they have passed the newest event, which is of that day. Only for
-- an outbox with time partitions: the settled rows of a plain table may be deleted.
with newest as materialized (
    select e.xid, e.created_at from {rows} as e order by e.id desc limit 1
)
select s.name
from mailboat.subscriptions as s
cross join newest
where s.outbox = %(outbox)s and s.name = any (%(names)s::text[]) and s.retired_at is null and s.state <> 'Paused'
  and newest.created_at > clock_timestamp() - interval '1 day'
  and (select c.relkind = 'p' from pg_class as c where c.oid = to_regclass(%(outbox)s))
  and not exists (select from mailboat.cursors as c
                  where c.subscription_id = s.id
                    and (c.window_snapshot is not null or not pg_visible_in_snapshot(newest.xid, c.settled_snapshot)))
  and not exists (select from mailboat.cursors as c join {rows} as e on e.id = c.highest_settled_id
                  where c.subscription_id = s.id and e.created_at > clock_timestamp() - interval '1 day')
order by s.name

-- name: snapshot_holder
-- The session, prepared transaction or replication slot with the oldest transaction id. Sessions are those of this database and
-- those without one, prepared transactions those of this database, replication slots those of the server. Columns: its kind, its
-- name, a description, its start time, and the current time. Without the rights of pg_monitor, the start time and the state of
-- another user's session are null. Autovacuum is left out: it ends by itself, and its snapshot does not count while it vacuums.
select found.kind, found.name, found.description, found.since, clock_timestamp()
from (
    select 'session' as kind, a.pid::text as name,
           format('process %s, user %s, application "%s"%s', a.pid, a.usename, left(a.application_name, 64),
                  coalesce(', ' || a.state, '')) as description,
           a.xact_start as since, greatest(age(a.backend_xid), age(a.backend_xmin)) as transactions
    from pg_stat_activity as a
    where (a.backend_xid is not null or a.backend_xmin is not null) and a.pid <> pg_backend_pid()
      and a.backend_type is distinct from 'autovacuum worker'
      and coalesce(a.datname = current_database(), true)
    union all
    select 'prepared transaction', p.gid, format('prepared transaction "%s" of user %s', left(p.gid, 64), p.owner), p.prepared,
           age(p.transaction)
    from pg_prepared_xacts as p
    where p.database = current_database()
    union all
    select 'replication slot', s.slot_name, format('replication slot "%s"', s.slot_name), null, age(s.xmin)
    from pg_replication_slots as s
    where s.xmin is not null
) as found
order by found.transactions desc, found.since
limit 1
