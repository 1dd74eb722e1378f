-- Facts about a database with `manageSchema: false`, whose schema Mailboat does not manage. verify.py evaluates them.

-- name: server
-- The server, the schema, and the tables that the migrations should have created.
select current_setting('server_encoding') as encoding,
       current_user as "user",
       current_database() as database,
       exists (select from pg_namespace where nspname = 'mailboat') as schema,
       exists (select from pg_roles where rolname = 'mailboat_relay') as role,
       array(select t from unnest(%(tables)s::text[]) t
             where not exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
                               where n.nspname = 'mailboat' and c.relname = t)) as missing_tables

-- name: relation
-- The outbox: its kind of table, its indexes, its sequence with the number of values that a session takes from it at once, and
-- whether row security and the trigger are active.
select c.relkind::text as kind,
       format('%%I.%%I', n.nspname, c.relname) as name,
       exists (select from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
               where i.indrelid = c.oid and i.indisvalid and i.indpred is null and a.attname = %(xid)s) as xid_index,
       exists (select from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
               where i.indrelid = c.oid and i.indisvalid and i.indpred is null and a.attname = %(id)s) as id_index,
       numbers.sequence,
       (select seqcache from pg_sequence where seqrelid = to_regclass(numbers.sequence)) as cache,
       row_security_active(c.oid) as hides_rows,
       exists (select from pg_trigger t join pg_proc f on f.oid = t.tgfoid join pg_namespace fn on fn.oid = f.pronamespace
               where t.tgrelid = c.oid and t.tgenabled <> 'D' and fn.nspname = 'mailboat'
                 and f.proname = 'notify_on_insert') as notifies
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
left join lateral (
    select format('%%I.%%I', sn.nspname, s.relname) as sequence
    from pg_attrdef d
    join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum and a.attname = %(id)s
    join pg_depend p on p.classid = 'pg_attrdef'::regclass and p.objid = d.oid and p.refclassid = 'pg_class'::regclass
    join pg_class s on s.oid = p.refobjid and s.relkind = 'S'
    join pg_namespace sn on sn.oid = s.relnamespace
    where d.adrelid = c.oid
    union all
    select pg_get_serial_sequence(format('%%I.%%I', n.nspname, c.relname), a.attname)
    from pg_attribute a
    where a.attrelid = c.oid and a.attname = %(id)s and a.attidentity <> ''
    limit 1) as numbers on true
where c.oid = to_regclass(%(outbox)s)

-- name: lost_ids
-- Whether an event has a position below 1, which no relay reads. By the index on the position.
select exists (select from {outbox} as e where e.{id} <= 0)

-- name: without_xid
-- The number of rows without a transaction id, which no relay reads, up to a bound. By the index on the transaction id, which
-- includes nulls.
select count(*) from (select from {outbox} as e where e.{xid} is null limit %(most)s) as bounded

-- name: columns
-- The columns of the outbox with their types and defaults, whether each is NOT NULL, and whether it is generated. A domain of
-- schema mailboat counts as the type that it restricts.
select a.attname, format_type(case when t.typnamespace = 'mailboat'::regnamespace then t.typbasetype else t.oid end, null),
       coalesce(pg_get_expr(d.adbin, d.adrelid), ''), a.attnotnull, a.attgenerated <> ''
from pg_attribute a
join pg_type t on t.oid = a.atttypid
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = to_regclass(%(outbox)s) and a.attnum > 0 and not a.attisdropped

-- name: registered
-- Whether the table is registered in mailboat.outboxes.
select exists (select from mailboat.outboxes o where to_regclass(o.name) = to_regclass(%(outbox)s))

-- name: relay_role
-- The relay role of the outbox, whether that role exists, and whether the current user needs no other rights, because it has that
-- role or the role of the schema's owner.
select quote_ident(o.relay), to_regrole(quote_ident(o.relay)) is not null,
       pg_has_role(to_regrole(quote_ident(o.relay)), 'usage') is true
       or (select pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = 'mailboat')
from mailboat.outboxes o
where to_regclass(o.name) = to_regclass(%(outbox)s)

-- name: rights
-- Rights that the current user needs and does not have.
select format('select on %%s', %(outbox)s::text)
where not has_table_privilege(to_regclass(%(outbox)s), 'select')
union all
select format('%%s on mailboat.%%s', r, t)
from unnest(%(tables)s::text[]) t, unnest(array['select', 'insert', 'update', 'delete']) r
where not has_table_privilege(to_regclass('mailboat.' || t), r)
union all
select 'execute on function mailboat.ensure_partitions(text, interval)'
where to_regprocedure('mailboat.ensure_partitions(text, interval)') is not null
  and not has_function_privilege('mailboat.ensure_partitions(text, interval)', 'execute')

-- name: usable
-- Schemas on which the current user lacks USAGE.
select n.nspname
from pg_namespace n
where n.nspname in ('mailboat', (parse_ident(%(outbox)s))[1]) and not has_schema_privilege(n.oid, 'usage')
order by 1
