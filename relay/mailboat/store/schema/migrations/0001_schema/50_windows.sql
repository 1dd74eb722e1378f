-- Reading a window (docs/windows.md). Relays read with the statements of store/sql/windows.sql and call mailboat.settled_before.
-- The other functions serve mailboat.pull.

-- Whether cursors of an earlier layout (`previous_layout`: the number of partitions, and the cursor of each) have settled an
-- event. If that layout was itself not finished, its cursors contain the `previous_layout` of the one before.
create function mailboat.settled_before(previous_layout jsonb, slot integer, xid xid8, id bigint) returns boolean
    language plpgsql stable strict parallel safe
    set search_path = pg_catalog, pg_temp
as $$
declare
    cursor_of jsonb := previous_layout -> 'cursors' -> (slot % (previous_layout ->> 'partitions')::integer);
begin
    if cursor_of ->> 'window_snapshot' is not null
       and pg_visible_in_snapshot(xid, (cursor_of ->> 'window_snapshot')::pg_snapshot)
       and id <= (cursor_of ->> 'position')::bigint then
        return true;
    end if;
    if jsonb_typeof(cursor_of -> 'previous_layout') = 'object' then
        return mailboat.settled_before(cursor_of -> 'previous_layout', slot, xid, id);
    end if;
    return pg_visible_in_snapshot(xid, (cursor_of ->> 'settled_snapshot')::pg_snapshot);
end
$$;

-- An event of mailboat.pull (mailboat.pulled in 70_pull.sql) with the columns that only the functions below need.
create type mailboat.candidate as (
    "position"      bigint,
    event_id        uuid,
    event_type      text,
    aggregate_type  text,
    aggregate_id    text,
    key             text,
    payload         bytea,
    content_type    text,
    headers         jsonb,
    tags            text[],
    traceparent     text,
    created_at      timestamptz,
    slot            integer,
    xid             xid8,
    group_label     text
);

create type mailboat.window_chunk as (
    batch            mailboat.candidate[],              -- matching events in order of position, one more than requested
    window_snapshot  pg_snapshot,
    complete         boolean,                           -- no matching event lies after the batch
    more             boolean,                           -- the batch was cut: the next event follows right after it
    reach            bigint,                            -- last position that was read
    lowest           bigint,
    highest          bigint
);

-- The label of an event's group; null: the event has no group. `group_by` names headers, or tags of the form name=value.
create function mailboat.group_label(group_by text[], headers jsonb, tags text[], xid xid8) returns text
    language sql immutable
    set search_path = pg_catalog, pg_temp
    return case
        when cardinality(group_by) = 0 then null
        when group_by = '{transaction}' then xid::text
        else (select case when count(v.value) > 0 then string_agg(coalesce(v.value, ''), chr(31) order by v.ordinal) end
              from (select n.ordinal,
                           coalesce(headers ->> n.name,
                                    (select substr(t, length(n.name) + 2) from unnest(tags) t
                                     where starts_with(t, n.name || '=') limit 1)) as value
                    from unnest(group_by) with ordinality n(name, ordinal)) v)
    end;

-- The FROM item that selects from the outbox under Mailboat's column names. An existing table may have other types and nulls.
create function mailboat.pull_rows(outbox text, columns jsonb) returns text
    language sql stable
    set search_path = pg_catalog, pg_temp
    return case when columns = '{}' then to_regclass(outbox)::text else (
        select format('(select %s from %s as t)',
                      string_agg(format(c.read_as, format('t.%I', coalesce(columns ->> c.name, c.name))) || ' as ' || c.name, ', '),
                      to_regclass(outbox))
        from (values ('id', '%s'), ('xid', '%s'), ('created_at', '%s'), ('event_id', '%s'), ('event_type', '%s::text'),
                     ('aggregate_type', '%s::text'), ('aggregate_id', '%s::text'), ('key', '%s::text'), ('slot', 'coalesce(%s & 2147483647, 0)'),
                     ('payload', '%s'), ('content_type', 'coalesce(%s::text, ''application/json'')'),
                     ('headers', 'mailboat.headers_to_jsonb(%s::text)'), ('tags', 'coalesce(%s::text[], ''{}'')'),
                     ('traceparent', '%s::text')) c(name, read_as)) end;

-- The condition that a row `e` of the subscription must meet.
create function mailboat.pull_predicate(s mailboat.subscriptions, p mailboat.pull_policies) returns text
    language sql stable
    set search_path = pg_catalog, pg_temp
    return concat_ws(' and ', 'true',
        case when p.event_types is not null then format('e.event_type like any (%L::text[])', p.event_types) end,
        case when p.aggregate_types is not null
             then format('coalesce(e.aggregate_type like any (%L::text[]), false)', p.aggregate_types) end,
        case when p.tags_all is not null then format('e.tags @> %L::text[]', p.tags_all) end,
        case when p.tags_any is not null then format('e.tags && %L::text[]', p.tags_any) end,
        case when p.tags_none is not null then format('not e.tags && %L::text[]', p.tags_none) end,
        case when s.since_time is not null then format('e.created_at >= %L::timestamptz', s.since_time) end,
        case when s.since_id is not null then format('e.id >= %s', s.since_id) end);

-- Create the functions that read the events of one subscription, so that Postgres caches their plans: planning a statement on a
-- table with a partition per day takes longer than reading a hundred events of it. Called when the subscription is declared, and
-- again when its table or filter changes.
--
-- probe_<id>: the closed cursors that have matching events. tail_<id>: the events that became visible since `settled_snapshot`.
-- walk_<id>: a chunk of an open window, by position. The first arm of the union has the late events, whose transactions were
-- running in `settled_snapshot`. If there were none, a statement without that arm is used, which halves the plan.
create function mailboat.make_readers(subscription bigint) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
as $$
declare
    s       mailboat.subscriptions := (select m from mailboat.subscriptions m where m.id = subscription);
    p       mailboat.pull_policies := (select m from mailboat.pull_policies m where m.subscription_id = subscription);
    source  text;
    wanted  text;
    event   text;
    reader  record;
begin
    if p.subscription_id is null then
        return;
    end if;
    source := mailboat.pull_rows(s.outbox, p.columns);
    wanted := mailboat.pull_predicate(s, p);
    event := format('row(e.id, e.event_id, e.event_type, e.aggregate_type, e.aggregate_id, e.key, e.payload, e.content_type,'
                    ' e.headers, e.tags, e.traceparent, e.created_at, e.slot, e.xid, %s)::mailboat.candidate',
                    case when p.group_by = '{}' then 'null'
                         else format('mailboat.group_label(%L, e.headers, e.tags, e.xid)', p.group_by) end);
    for reader in
        select r.name || '_' || subscription as name, r.arguments,
               format('#variable_conflict use_column%1$sbegin%1$sif %2$s then%1$s%3$s;%1$selse%1$s%4$s;%1$send if;%1$send', E'\n', r.has_late,
                      format(r.statement, source, wanted, event, format(r.late, source), p.group_by <> '{}'),
                      format(r.statement, source, wanted, event, '', p.group_by <> '{}')) as body
        from (values
            ('probe',
             'subscription bigint, partitions integer, most bigint, out scanned bigint, out head pg_snapshot, out hits integer[],'
             ' out closed integer[], out settled_snapshots text[], out seen_late boolean',
             'exists (select from mailboat.cursors m, pg_snapshot_xip(m.settled_snapshot)'
             ' where m.subscription_id = $1 and m.window_snapshot is null)',
             $probe$
             with mine as materialized (
                 select m.partition, m.settled_snapshot from mailboat.cursors m
                 where m.subscription_id = $1 and m.window_snapshot is null
             ), edge as materialized (
                 select min(pg_snapshot_xmax(settled_snapshot)::text::numeric)::text::xid8 as xmax from mine
             ), found as materialized (%4$s
                 select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %1$s as e
                 where e.xid >= (select xmax from edge)
                 limit $3 + 1
             )
             select (select count(*) from found), pg_current_snapshot(),
                    array(select h.partition from (
                        select distinct mine.partition from found as e join mine on mine.partition = e.slot %% $2
                        where not pg_visible_in_snapshot(e.xid, mine.settled_snapshot)
                          and pg_visible_in_snapshot(e.xid, pg_current_snapshot()) and %2$s) h order by random()),
                    (select array_agg(partition order by partition) from mine),
                    (select array_agg(settled_snapshot::text order by partition) from mine),
                    (select bool_or(exists (select pg_snapshot_xip(settled_snapshot))) from mine)
             into scanned, head, hits, closed, settled_snapshots, seen_late$probe$,
             $late$
                 select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %s as e
                 where e.xid = any (array(select distinct pg_snapshot_xip(settled_snapshot) from mine))
                   and e.xid < (select xmax from edge)
                 union all$late$),
            -- At most 32 MiB of payload, or one event. A group is never cut, regardless of its size.
            ('tail',
             'settled_snapshot pg_snapshot, reading bigint, partitions integer, of_partition integer, most integer,'
             ' out scanned bigint, out window_snapshot pg_snapshot, out batch mailboat.candidate[], out lowest bigint,'
             ' out highest bigint, out matching bigint',
             'exists (select pg_snapshot_xip($1))',
             $tail$
             with found as materialized (%4$s
                 select e.*, false as late from %1$s as e
                 where e.xid >= pg_snapshot_xmax($1) and e.xid < pg_snapshot_xmax(pg_current_snapshot())
                   and pg_visible_in_snapshot(e.xid, pg_current_snapshot())
                 limit $2
             ), listed as materialized (
                 select e.*, sum(octet_length(e.payload)) over (order by e.id rows between unbounded preceding and 1 preceding) as before
                 from found as e
                 where e.slot %% $3 = $4 and %2$s order by e.id limit $5 + 1
             )
             select (select count(*) from found), pg_current_snapshot(),
                    array(select %3$s from listed as e where coalesce(e.before, 0) < 33554432 or %5$L order by e.id),
                    (select coalesce(min(id) filter (where not late), max(id) + 1) from found), (select max(id) from found),
                    (select count(*) from listed)
             into scanned, window_snapshot, batch, lowest, highest, matching$tail$,
             $late$
                 select e.*, true as late from %s as e
                 where e.xid = any (array(select pg_snapshot_xip($1))) and pg_visible_in_snapshot(e.xid, pg_current_snapshot())
                 union all$late$),
            ('walk',
             'settled_snapshot pg_snapshot, window_snapshot pg_snapshot, "position" bigint, lowest bigint, reach bigint,'
             ' previous_layout jsonb, partitions integer, of_partition integer, most integer, out batch mailboat.candidate[], out matching bigint',
             '$3 < $4 - 1 and exists (select pg_snapshot_xip($1))',
             $walk$
             with found as (%4$s
                 (select e.*, false as late from %1$s as e
                  where e.id > greatest($3, $4 - 1) and e.id <= $5 and pg_visible_in_snapshot(e.xid, $2)
                    and e.slot %% $7 = $8 and %2$s
                    and case when $6 is null then not pg_visible_in_snapshot(e.xid, $1)
                             else not mailboat.settled_before($6, e.slot, e.xid, e.id) end
                  order by e.id limit $9 + 1)
             ), listed as materialized (
                 select e.*, sum(octet_length(e.payload)) over (order by e.id rows between unbounded preceding and 1 preceding) as before
                 from found as e
                 where e.slot %% $7 = $8 and %2$s order by e.id limit $9 + 1
             )
             select array(select %3$s from listed as e where coalesce(e.before, 0) < 33554432 or %5$L order by e.id),
                    (select count(*) from listed)
             into batch, matching$walk$,
             $late$
                 (select e.*, true as late from %s as e
                  where e.xid = any (array(select pg_snapshot_xip($1))) and pg_visible_in_snapshot(e.xid, $2)
                    and e.id > $3 and e.id < $4
                  offset 0)
                 union all$late$)
        ) r(name, arguments, has_late, statement, late)
    loop
        continue when exists (select from pg_proc f where f.pronamespace = 'mailboat'::regnamespace and f.proname = reader.name
                                                      and f.prosrc = reader.body);
        execute format('create or replace function mailboat.%I(%s) language plpgsql set search_path = pg_catalog, pg_temp as %L',
                       reader.name, reader.arguments, reader.body);
        execute format('revoke execute on function mailboat.%I from public', reader.name);
    end loop;
end
$$;

-- Return the next events of a cursor that the caller has locked: at most `most` and one more, in order of position. A closed
-- cursor reads the events that became visible since `settled_snapshot`; an open one continues along the primary key. If there are
-- more than fit into one read, the result has bounds and no events, and the caller opens the window and reads again.
create function mailboat.read_chunk(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, most integer
) returns mailboat.window_chunk
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    found    mailboat.window_chunk;
    scanned  bigint;
    matching bigint;
    reading  constant bigint := 2000;                    -- rows of all partitions in one sorted read
    source   constant text := mailboat.pull_rows(s.outbox, p.columns);
begin
    if c.window_snapshot is null then
        execute format('select * from mailboat.tail_%s($1, $2, $3, $4, $5)', s.id)
        using c.settled_snapshot, reading + 1, s.partitions, c.partition, most
        into scanned, found.window_snapshot, found.batch, found.lowest, found.highest, matching;
        if scanned > reading then
            found.batch := null;
            if c.settled_snapshot::text = '3:3:' then
                execute format('select pg_current_snapshot(), min(e.id), max(e.id) from %s as e', source)
                into found.window_snapshot, found.lowest, found.highest;
            else
                found := mailboat.window_bounds(source, c);
            end if;
            return found;
        end if;
        found.more := matching > least(cardinality(found.batch), most);
        found.complete := not found.more;
        return found;
    end if;
    if c.lowest is null then                            -- a small window that a relay opened
        return mailboat.window_bounds(source, c);
    end if;
    -- Read a bounded range of positions at a time: if few events match, a read must not exceed the statement timeout.
    found.reach := least(c.highest, greatest(c.position, c.lowest - 1) + 100000);
    execute format('select * from mailboat.walk_%s($1, $2, $3, $4, $5, $6, $7, $8, $9)', s.id)
    using c.settled_snapshot, c.window_snapshot, c.position, c.lowest, found.reach, c.previous_layout, s.partitions,
          c.partition, most
    into found.batch, matching;
    if cardinality(found.batch) = 0 and found.reach < c.highest then
        execute format('select min(e.id) - 1 from %s as e where e.id > $1', source) using found.reach into found.reach;
        found.reach := least(coalesce(found.reach, c.highest), c.highest);
    end if;
    found.window_snapshot := c.window_snapshot;
    found.lowest := c.lowest;
    found.highest := c.highest;
    found.more := matching > least(cardinality(found.batch), most);
    found.complete := found.reach >= c.highest and not found.more;
    return found;
end
$$;

-- Return the range of a large window; see `span` in store/sql/windows.sql. `offset 0` is a fence: without it, the planner scans
-- the primary key from its beginning to find a minimum.
create function mailboat.window_bounds(rows_ text, c mailboat.cursors) returns mailboat.window_chunk
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    found mailboat.window_chunk;
begin
    execute format($span$
        select coalesce($2, pg_current_snapshot()),
               case when count(*) filter (where fresh.late) <= 1000
                    then coalesce(min(fresh.id) filter (where not fresh.late), max(fresh.id) + 1)
                    else min(fresh.id) end,
               max(fresh.id)
        from (
            select e.id, true as late from %1$s as e
            where e.xid = any (array(select pg_snapshot_xip($1)))
              and pg_visible_in_snapshot(e.xid, coalesce($2, pg_current_snapshot()))
            union all
            select e.id, false from %1$s as e
            where e.xid >= pg_snapshot_xmax($1) and e.xid < pg_snapshot_xmax(coalesce($2, pg_current_snapshot()))
              and pg_visible_in_snapshot(e.xid, coalesce($2, pg_current_snapshot()))
            offset 0
        ) as fresh$span$, rows_)
    using c.settled_snapshot, c.window_snapshot
    into found.window_snapshot, found.lowest, found.highest;
    return found;
end
$$;

-- Return the number of events of a batch that can be returned without cutting a group; null: the last group continues after the
-- batch. A group by headers or tags is a run of adjacent events. Events of a transaction may have others between them.
create function mailboat.whole_groups(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, found mailboat.window_chunk, most integer
) returns integer
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    batch mailboat.candidate[] := found.batch;
    size  integer := cardinality(batch);
    cut   integer := least(most, size);
    last  bigint;
begin
    if cut = 0 then
        return cut;
    end if;
    if p.group_by <> '{transaction}' then
        while cut < size and batch[cut].group_label = batch[cut + 1].group_label loop
            cut := cut + 1;
        end loop;
        return case when cut < size or found.complete or batch[size].group_label is null then cut end;
    end if;
    loop
        execute format('select max(e.id) from %s as e where e.xid = any ($1) and e.slot %% %s = %s and %s',
                       mailboat.pull_rows(s.outbox, p.columns), s.partitions, c.partition, mailboat.pull_predicate(s, p))
        using array(select distinct u.xid::text::xid8 from unnest(batch[1:cut]) u)
        into last;
        exit when last <= batch[cut].position;
        if batch[size].position < last then
            return null;
        end if;
        while batch[cut].position < last loop
            cut := cut + 1;
        end loop;
    end loop;
    return cut;
end
$$;
