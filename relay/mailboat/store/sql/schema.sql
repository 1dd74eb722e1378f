-- Statements of `mailboat migrate`. The migrations are in store/schema/migrations.

-- name: lock
-- Lock out other migrations of this database until the transaction ends. Only the owner of the table can take this lock, whereas
-- any user could hold an advisory lock. The first migration has no such table; there, two transactions that create the schema
-- exclude each other.
lock table mailboat.migrations in share row exclusive mode

-- name: lock_timeout
-- Limit the wait for a lock, in this transaction.
select set_config('lock_timeout', %(timeout)s, true)

-- name: lock_holder
-- The session of the running migration. This session holds the lock, or a new table that is invisible to other sessions.
select l.pid, coalesce(a.usename, '?'), coalesce(nullif(a.application_name, ''), '?')
from pg_locks l left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'relation' and l.granted
  and l.database = (select oid from pg_database where datname = current_database())
  and (l.relation = to_regclass('mailboat.migrations') and l.mode = 'ShareRowExclusiveLock'
       or l.mode = 'AccessExclusiveLock' and not exists (select from pg_class c where c.oid = l.relation))
limit 1

-- name: made
-- Whether Mailboat created this table as an outbox, under exactly this name.
select exists (select from mailboat.outboxes o
               join pg_namespace n on true
               join pg_class c on c.relnamespace = n.oid and format('%%I.%%I', n.nspname, c.relname) = o.name
               where o.name = %(outbox)s and c.relkind = 'p')

-- name: ensure_partitions
-- Create missing time partitions. If none is missing, write nothing and take no lock.
select mailboat.ensure_partitions(%(outbox)s)

-- name: facts
-- Facts that are checked before a migration changes anything. Not to_regclass, which answers from a cache. The cache may not
-- contain yet the tables that another migration committed while this one waited for the lock.
select pg_is_in_recovery() as standby,
       exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = 'mailboat' and c.relname = 'migrations') as ledger,
       current_database() as database,
       current_setting('server_encoding') as encoding

-- name: outbox
-- The canonical name of the outbox, and whether a table of that name exists, regardless of its owner.
select format('%%I.%%I', name[1], name[2]),
       exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = name[1] and c.relname = name[2])
from parse_ident(%(outbox)s) as name

-- name: create_ledger
-- Create the table of applied migrations. CREATE SCHEMA IF NOT EXISTS would require the right to create schemas even if the
-- schema exists.
do $$
begin
    if not exists (select from pg_namespace where nspname = 'mailboat') then
        create schema mailboat;
    end if;
    create table mailboat.migrations (
        version     integer primary key,
        name        text not null,
        checksum    text not null,
        applied_at  timestamptz not null default now()
    );
end
$$

-- name: applied
-- Migrations that were applied.
select version, name, checksum from mailboat.migrations order by version

-- name: record
-- Record an applied migration.
insert into mailboat.migrations (version, name, checksum) values (%(version)s, %(name)s, %(checksum)s)

-- name: create_outbox
-- Create the outbox, its time partitions and its grants, as far as they are missing.
select mailboat.create_outbox(%(outbox)s)

-- name: grant_roles
-- Grant rights again, because a migration may have added tables.
select mailboat.grant_roles()

-- name: missing_roles
-- Roles that the migrating user could not create: those of the outboxes, and that of consumers.
select r.role
from (select o.rank, o.role
      from mailboat.outboxes x cross join lateral (values (1, x.writer), (2, x.relay)) o(rank, role)
      union all
      values (3, 'mailboat_consumer')) r
where not exists (select from pg_roles where rolname = r.role)
group by r.role
order by min(r.rank)
