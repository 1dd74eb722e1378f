-- Holders of old snapshots, which keep Postgres from removing dead row versions.

-- name: holder
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
