-- What `mailboat migrate` asks and does. The migrations themselves are in migrations/.

-- name: lock
-- One migration at a time in a database, until the end of the transaction. Only the table's owner can take it: an advisory lock
-- could be held by anybody. The first migration has no such table; there, two that create the schema exclude each other.
lock table mailboat.migrations in share row exclusive mode

-- name: wait_at_most
-- For a lock, in this transaction.
select set_config('lock_timeout', %(patience)s, true)

-- name: lock_holder
-- The session that migrates: it holds the lock, or a table that nobody else can see yet.
select l.pid, coalesce(a.usename, '?'), coalesce(nullif(a.application_name, ''), '?')
from pg_locks l left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'relation' and l.granted
  and l.database = (select oid from pg_database where datname = current_database())
  and (l.relation = to_regclass('mailboat.migrations') and l.mode = 'ShareRowExclusiveLock'
       or l.mode = 'AccessExclusiveLock' and not exists (select from pg_class c where c.oid = l.relation))
limit 1

-- name: made
-- Whether the table is an outbox that Mailboat made, under this very name.
select exists (select from mailboat.outboxes o
               join pg_namespace n on true
               join pg_class c on c.relnamespace = n.oid and format('%%I.%%I', n.nspname, c.relname) = o.name
               where o.name = %(outbox)s and c.relkind = 'p')

-- name: supply
-- Makes partitions that are missing; without any it writes nothing and takes no lock.
select mailboat.ensure_partitions(%(outbox)s)

-- name: facts
-- What a migration must know before it touches anything. (Not to_regclass: it answers from a cache, which may not have
-- heard yet of what another migration committed while this one waited for the lock.)
select pg_is_in_recovery() as standby,
       exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = 'mailboat' and c.relname = 'migrations') as ledger,
       current_database() as database,
       current_setting('server_encoding') as encoding,
       current_user as "user"

-- name: outbox
-- The outbox's name as Postgres spells it, and whether there is such a table, whosever it is.
select format('%%I.%%I', name[1], name[2]),
       exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = name[1] and c.relname = name[2])
from parse_ident(%(outbox)s) as name

-- name: create_ledger
-- The table that says which migrations were applied. (CREATE SCHEMA IF NOT EXISTS would ask for rights that are not
-- needed once it is there.)
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
-- Which migrations were applied.
select version, name, checksum from mailboat.migrations order by version

-- name: record
-- One more was applied.
insert into mailboat.migrations (version, name, checksum) values (%(version)s, %(name)s, %(checksum)s)

-- name: create_outbox
-- Makes the outbox, its partitions and its grants, or whatever of it is missing.
select mailboat.create_outbox(%(outbox)s)

-- name: grant_roles
-- A migration may have added tables.
select mailboat.grant_roles()

-- name: missing_roles
-- Roles that the migrating user could not create: those of outboxes, and that of consumers.
select r.role
from (select o.rank, o.role
      from mailboat.outboxes x cross join lateral (values (1, x.writer), (2, x.relay)) o(rank, role)
      union all
      values (3, 'mailboat_consumer')) r
where not exists (select from pg_roles where rolname = r.role)
group by r.role
order by min(r.rank)
