-- Statements that read and settle windows. docs/windows.md explains their design.
--
-- The two arms are a UNION ALL because an OR reads the whole retained table on every poll.
--
-- A relay stores P (`settled_snapshot`) of an idle cursor only every few seconds. Until then it has the current P in memory and
-- passes it as a parameter, with the epoch checked. A P in memory is valid only as long as its connection: after a crash or a
-- failover the server assigns the same transaction ids again. Behind a pooler, a connection hides a crash. There every P is
-- stored at once and compared with the stored one (`pooled`).
--
-- Statements find a cursor by its epoch, which is unique and new with every claim. A lookup by the primary key passes all former
-- versions of the row that an old snapshot keeps; a lookup by the epoch passes those since the last claim only
-- (docs/windows.md, Old snapshots). The condition on the epoch is `= any`: if there is only a join, and the table has few rows, the
-- planner joins with a scan of the whole index, which passes all former versions.

-- name: planner
-- Settings of a connection that reads windows, without a pooler. No bitmaps: they are built completely, a day of index entries,
-- before the first row is returned and a limit can end the scan.
select set_config('jit', 'off', false),
       set_config('enable_seqscan', 'off', false),
       set_config('enable_bitmapscan', 'off', false),
       set_config('plan_cache_mode', 'force_generic_plan', false)

-- name: guard
-- First in every transaction behind a pooler: the same settings for this transaction, and the identity of the server.
select set_config('jit', 'off', true),
       set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true),
       set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('synchronous_commit', 'off', true),
       pg_is_in_recovery(),
       case when pg_is_in_recovery() then null else left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) end,
       (select system_identifier from pg_control_system())

-- name: head
-- The P of a group of cursors, by the lease of one of them: a closed cursor, or one whose window ends at P and is settled by the same
-- tick. If that lease was lost, or the cursor is not at P, there is no row.
head as materialized (
    select %(settled_snapshot)s::text::pg_snapshot as settled_snapshot
    from mailboat.cursors
    where epoch = %(epoch)s
      and case when window_snapshot is null then not %(pooled)s or settled_snapshot::text = %(settled_snapshot)s
               else window_snapshot::text = %(settled_snapshot)s end
)

-- name: this_window
-- An open window, by the lease of one of its cursors. If that lease was lost, or the cursor is in another window, there is no
-- row.
w as materialized (
    select settled_snapshot, window_snapshot, lowest, highest, previous_layout
    from mailboat.cursors
    where epoch = %(epoch)s and window_snapshot::text = %(window_snapshot)s
)

-- name: tail
-- The events that became visible since the group's `settled_snapshot`, by transaction id, up to a limit. The result has at least
-- one row, with the snapshot. If this relay lost the lease of the cursor, the result has no row, which does not mean that there
-- are no events. If there are too many rows or bytes for one read, the result has no events, only their number. `stray`: a time
-- partition that the statement leaves out has rows, so the result is void.
-- Last column: the server process.
with {head},
fresh as materialized (
    {late_arm}
    select e.*
    from {rows} as e
    where e.xid >= (select pg_snapshot_xmax(settled_snapshot) from head)
      and e.xid < pg_snapshot_xmax(pg_current_snapshot())
      and pg_visible_in_snapshot(e.xid, pg_current_snapshot()) {occupied}
    limit %(limit)s
),
total as materialized (
    select count(*) as rows,
           count(*) >= %(limit)s or coalesce(sum({row_bytes}) filter (where {wanted}) > %(max_bytes)s, false) as too_much
    from fresh as found
)
select {columns}{also_routes}, {stray}, total.rows, total.too_much, pg_current_snapshot()::text,
       pg_backend_pid()
from head
cross join total
left join fresh as found on not total.too_much and {wanted}
order by found.id

-- name: late_arm
-- The first arm of the tail: transactions that were running in `settled_snapshot`. Left out if there were none.
select e.*
    from {rows} as e
    where e.xid = any (array(select pg_snapshot_xip(settled_snapshot) from head))
      and pg_visible_in_snapshot(e.xid, pg_current_snapshot()) {occupied}
    union all

-- name: occupied
-- Both arms leave out the time partitions that were created ahead. The bound is a literal, so the plan has no scans of them, and no
-- execution locks them. `is null` is never true. This condition keeps Postgres 14 to 16 from reading all rows of a
-- partition by an index condition on `created_at`, the second column of the primary key: these versions estimate a lookup by a
-- list of transactions to cost more than that.
and (e.created_at < {before}::timestamptz or e.created_at is null)

-- name: stray
-- Whether a time partition that the statement leaves out is not empty, by the size of its file. A row that is visible in the
-- statement's snapshot was in the file before the snapshot was taken, and this expression is evaluated after that. So no clock
-- and no explicit `created_at` hides a row. The first comparison detects a table that was replaced by another one of its name. A
-- poll that finds no events moves no snapshot, so a later poll can make the check, which is half of the cost of such a poll. The
-- inner `case` keeps the planner from evaluating the sizes of the partitions that are read: it estimates that comparison as the
-- cheaper one.
case when total.rows > 0 or %(checks)s then ({outbox}::regclass <> %(outbox)s::oid::regclass or exists (
           select from pg_inherits as i
           where i.inhparent = {outbox}::regclass
             and case when i.inhrelid <> all (%(read)s::oid[]) then pg_relation_size(i.inhrelid) > 0 else false end))
     else false end

-- name: time_partitions
-- The time partitions that a poll reads: all up to the last one that is not empty. If the table is not partitioned by ranges of
-- `created_at`, or a partition is of another kind than Mailboat's own, there is no row, and a poll reads the whole table.
with children as (
    select i.inhrelid, m[1]::timestamptz as lower, pg_relation_size(i.inhrelid) > 0 as occupied, p.partrelid,
           c.relkind = 'r' and a.amname = 'heap' and m is not null as plain
    from pg_partitioned_table p
    join pg_attribute k on k.attrelid = p.partrelid and k.attnum = p.partattrs[0] and k.attname = %(created_at)s
    join pg_inherits i on i.inhparent = p.partrelid
    join pg_class c on c.oid = i.inhrelid
    left join pg_am a on a.oid = c.relam
    left join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(.*)''\) TO \(''(.*)''\)') m on true
    where p.partrelid = {outbox}::regclass and p.partstrat = 'r' and p.partnatts = 1
),
ahead as (
    select min(c.lower) as before
    from children c
    where c.lower > all (select o.lower from children o where o.occupied)
)
select min(c.partrelid::bigint), (select before from ahead)::text,
       coalesce(array_agg(c.inhrelid::bigint) filter (where c.lower < (select before from ahead)), '{{}}')
from children c
having bool_and(c.plain) and (select before from ahead) is not null

-- name: span
-- The range of a large window: the lowest and the highest id of the events that became visible since the group's
-- `settled_snapshot`. Late events, whose transactions were open at `settled_snapshot`, may lie far back, with all events that
-- were settled since in between. If they are few, the range begins after them, and `late` reads them by transaction. `offset 0`
-- is a fence: without it, the planner scans the primary key from its beginning to find a minimum.
with {head}
select pg_current_snapshot()::text,
       case when count(*) filter (where fresh.late) < %(limit)s
             and coalesce(sum(fresh.bytes) filter (where fresh.late), 0) <= %(max_bytes)s
            then coalesce(min(fresh.id) filter (where not fresh.late), max(fresh.id) + 1)
            else min(fresh.id)
       end,
       max(fresh.id)
from (
    select found.id, true as late, {row_bytes} as bytes
    from {rows} as found
    where found.xid = any (array(select pg_snapshot_xip(settled_snapshot) from head))
      and pg_visible_in_snapshot(found.xid, pg_current_snapshot())
    union all
    select e.id, false, 0
    from {rows} as e
    where e.xid >= (select pg_snapshot_xmax(settled_snapshot) from head)
      and e.xid < pg_snapshot_xmax(pg_current_snapshot())
      and pg_visible_in_snapshot(e.xid, pg_current_snapshot())
    offset 0
) as fresh

-- name: advance
-- Store the `settled_snapshot` of closed cursors that had no events up to it.
update mailboat.cursors as c
set settled_snapshot = %(settled_snapshot)s::text::pg_snapshot,
    position = 0,
    crash_count = 0,
    timeline = %(timeline)s
where c.epoch = any (%(epochs)s::uuid[]) and c.window_snapshot is null

-- name: still_open
-- Cursors that are still in this window under their epoch. One of them then reads for all. A cursor whose lease was lost must not
-- read, because each of its reads is empty. A read transaction has one snapshot, so the result holds for its later statements.
select c.subscription_id, c.partition
from mailboat.cursors as c
where c.epoch = any (%(epochs)s::uuid[]) and c.window_snapshot::text = %(window_snapshot)s

-- name: small_window
-- Read a small window again, after a restart or by a new owner: the same events in the same order. At least one event, then as
-- many as this relay reads at once, which may be fewer than before. Last column: the number of events.
with {this_window}
select {columns}{also_routes}, found.events
from (
    select found.*, row_number() over in_order as place, sum(found.bytes) over in_order as bytes_so_far, count(*) over () as events
    from (
        select found.*, {row_bytes} as bytes
        from (
            select e.*
            from {rows} as e
            where e.xid = any (array(select pg_snapshot_xip(settled_snapshot) from w))
              and pg_visible_in_snapshot(e.xid, (select window_snapshot from w))
            union all
            select e.*
            from {rows} as e
            where e.xid >= (select pg_snapshot_xmax(settled_snapshot) from w)
              and e.xid < (select pg_snapshot_xmax(window_snapshot) from w)
              and pg_visible_in_snapshot(e.xid, (select window_snapshot from w))
        ) as found
        where found.id > %(after)s and {wanted}
    ) as found
    window in_order as (order by found.id rows unbounded preceding)
) as found
where found.place = 1 or (found.place <= %(limit)s and found.bytes_so_far <= %(max_bytes)s)
order by found.id

-- name: late
-- The events of a large window that lie before its range, within the same limits. `offset 0` makes the planner read them by
-- transaction and not by id.
with {this_window}
select {columns}{also_routes}, found.events
from (
    select found.*, row_number() over in_order as place, sum(found.bytes) over in_order as bytes_so_far, count(*) over () as events
    from (
        select found.*, {row_bytes} as bytes
        from (
            select e.*
            from {rows} as e
            where e.xid = any (array(select pg_snapshot_xip(settled_snapshot) from w))
              and pg_visible_in_snapshot(e.xid, (select window_snapshot from w))
            offset 0
        ) as found
        where found.id > %(after)s and found.id < (select lowest from w) and {wanted}
    ) as found
    window in_order as (order by found.id rows unbounded preceding)
) as found
where found.place = 1 or (found.place <= %(limit)s and found.bytes_so_far <= %(max_bytes)s)
order by found.id

-- name: chunk_end
-- The end of the next chunk of a large window: a number of rows along the primary key, of any subscription, and the bytes of the
-- matching ones.
with {this_window}
select max(found.id), count(*), coalesce(sum({row_bytes}) filter (where {wanted}), 0)::bigint
from (
    select e.*
    from {rows} as e
    where e.id > %(after)s and e.id <= (select highest from w)
    order by e.id
    limit %(limit)s
) as found

-- name: chunk_end_within
-- The same if those rows have too many bytes: one event, or as many as fit into the limit of bytes.
with {this_window}
select max(ahead.id), count(*), sum(ahead.bytes)::bigint
from (
    select found.id, found.bytes, row_number() over in_order as place, sum(found.bytes) over in_order as bytes_so_far
    from (
        select found.id, case when {wanted} then {row_bytes} else 0 end as bytes
        from (
            select e.*
            from {rows} as e
            where e.id > %(after)s and e.id <= (select highest from w)
            order by e.id
            limit %(limit)s
        ) as found
        offset 0  -- else the bytes of a row are computed twice
    ) as found
    window in_order as (order by found.id rows unbounded preceding)
) as ahead
where ahead.place = 1 or ahead.bytes_so_far <= %(max_bytes)s

-- name: large_window
-- A chunk of a large window, along the primary key.
with {this_window}
select {columns}{also_routes}
from (
    select e.*
    from {rows} as e
    where e.id > %(after)s and e.id <= %(reach)s
      and pg_visible_in_snapshot(e.xid, (select window_snapshot from w))
      and {undone}
    order by e.id
) as found
where {wanted}
order by found.id

-- name: settle
-- Settle and open many cursors at once. `window_snapshot`: the open window, or null if the cursor is closed and is opened here.
-- `settled_snapshot`: null if the window stays open. A window that closes may be followed by the next one (`next_snapshot`) in the
-- same update. If the epoch or the window of a cursor is another one by now, the cursor stays unchanged.
-- A lost settlement costs only duplicates. The events of a window that is opened are published next. So the commit waits (`level`)
-- until the transaction is as durable as `durability` requires if it opens a window.
update mailboat.cursors as c
set settled_snapshot = coalesce(s.settled_snapshot::pg_snapshot, c.settled_snapshot),
    window_snapshot = case when s.settled_snapshot is null then c.window_snapshot else s.next_snapshot::pg_snapshot end,
    lowest = case when s.settled_snapshot is null then c.lowest else s.lowest end,
    highest = case when s.settled_snapshot is null then c.highest else s.highest end,
    previous_layout = case when s.settled_snapshot is null then c.previous_layout end,
    position = case when s.settled_snapshot is null then greatest(c.position, s.position) else 0 end,
    highest_settled_id = greatest(c.highest_settled_id, s.position),
    sequence = coalesce(s.sequence, c.sequence),
    crash_count = 0,
    timeline = case when s.next_snapshot is null then c.timeline else %(timeline)s end
from unnest(%(epochs)s::uuid[], %(window_snapshots)s::text[], %(settled_snapshots)s::text[], %(next_snapshots)s::text[],
            %(lowest_ids)s::bigint[], %(highest_ids)s::bigint[], %(positions)s::bigint[], %(sequences)s::bigint[])
     as s (epoch, window_snapshot, settled_snapshot, next_snapshot, lowest, highest, position, sequence)
where c.epoch = any (%(epochs)s::uuid[]) and c.epoch = s.epoch
  and c.window_snapshot::text is not distinct from s.window_snapshot
  and (not %(pooled)s or s.window_snapshot is not null or c.settled_snapshot::text = s.settled_snapshot)
returning c.subscription_id, c.partition, set_config('synchronous_commit', %(level)s, true)

-- name: fence
-- Lock the cursors of settlements that concern only parked events until the transaction ends. A cursor with another epoch is not
-- returned. `+ 0`: else the planner scans the primary key in this order.
select c.subscription_id, c.partition
from mailboat.cursors as c
where c.epoch = any (%(epochs)s::uuid[])
order by c.subscription_id + 0, c.partition
for no key update of c

-- name: in_flight
-- Record whether events are in flight. `claim` (leases.sql) counts a crash of the owner only then, because only then an event may
-- be its cause. Runs after a settlement or a fence of the same cursors, which has locked them.
update mailboat.cursors as c
set released = not h.in_flight
from unnest(%(epochs)s::uuid[], %(in_flight)s::boolean[]) as h (epoch, in_flight)
where c.epoch = any (%(epochs)s::uuid[]) and c.epoch = h.epoch and c.released = h.in_flight

-- name: sync
-- Set the durability of this transaction's commit, if no other statement of the transaction does.
select set_config('synchronous_commit', %(level)s, true)
