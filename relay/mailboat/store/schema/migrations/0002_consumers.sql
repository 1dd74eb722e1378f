-- Consumers without a broker: `sink: {pull: {}}`. Applications take events with mailboat.pull, in the transaction of their
-- effects; docs/consumers.md explains how, docs/windows.md what a window is.
--
-- The lock on a cursor's row is the ownership of its partition: it ends with the consumer's transaction, whatever becomes of
-- it. Work and progress commit together, so there is no lease, no acknowledgement and no inbox. The functions run with the
-- rights of the schema's owner, check who calls them (mailboat.consumer_grants), and qualify every name.

set local search_path = pg_catalog, pg_temp;

-- What the manifest of a pull subscription says: all that a consumer of any language needs. Written by `mailboat migrate`, by
-- relays and by the Python kit whenever they read the manifest.
create table mailboat.pull_policies (
    subscription_id  bigint primary key references mailboat.subscriptions on delete cascade,
    columns          jsonb not null,                    -- Mailboat's name of a column -> the table's own, where they differ
    event_types      text[],                            -- patterns of LIKE; null: all
    aggregate_types  text[],
    tags_all         text[],
    tags_any         text[],
    tags_none        text[],
    ordered          boolean not null,                  -- ordering: Key
    batch_size       integer not null check (batch_size > 0),
    group_by         text[] not null,                   -- headers or tags, or {transaction}; empty: no groups
    max_group        integer not null check (max_group > 0),
    max_attempts     integer not null check (max_attempts > 0),
    backoff_initial  double precision not null,         -- seconds, as are the others
    backoff_factor   double precision not null,
    backoff_max      double precision not null,
    backoff_jitter   double precision not null,
    blocks           boolean not null,                  -- onExhausted: Block
    emits_dead       boolean not null,                  -- sink.pull.emitDeadLetters
    no_handler       text not null                      -- for kits: DeadLetter or Ignore
);

select mailboat.guard_ledger('pull_policies', 'subscription');

-- Refusals of events that no cursor has passed yet. The consumer's transaction was rolled back, so the event is still in its
-- window; the next pull finds the refusal, sets the event aside and deletes the row.
create table mailboat.refusals (
    subscription_id  bigint not null references mailboat.subscriptions on delete cascade,
    event_id         uuid not null,
    failures         integer not null,                  -- attempts that count
    returns          integer not null,                  -- pulls that ended in an orderly way: no consumer died of these
    due_at           timestamptz,                       -- null: at once
    final            boolean not null,                  -- no further attempt
    reason           text,
    error            text,
    first_at         timestamptz not null default clock_timestamp(),
    last_at          timestamptz not null default clock_timestamp(),
    primary key (subscription_id, event_id)
);

-- Who may pull what, and who may mark events as handled under which name.
create table mailboat.consumer_grants (
    consumer  text not null,                            -- a subscription, or a name used with mailboat.once
    outbox    text not null,                            -- of the subscription; empty: the name is of no subscription
    role      name not null,
    primary key (consumer, outbox, role)
);

-- Events that mailboat.once has seen.
create table mailboat.handled (
    consumer    text not null,
    event_id    uuid not null,
    handled_at  timestamptz not null default clock_timestamp(),
    primary key (consumer, event_id)
);
create index handled_age on mailboat.handled (consumer, handled_at);

-- Consumers behind a broker with an inbox: the events that each process is handling. A row whose time is over belonged to a
-- process that died; its events count one attempt more.
create table mailboat.inbox_holders (
    consumer  text not null,
    instance  text not null,
    life      text not null,                            -- of one process; later lives of an instance sort behind earlier ones
    until     timestamptz not null,
    running   uuid[] not null,
    primary key (consumer, instance, life)
) with (fillfactor = 50);

-- Their events that failed or killed a process, until they are handled; dead letters until they are pruned.
create table mailboat.inbox_attempts (
    consumer    text not null,
    event_id    uuid not null,
    attempts    integer not null,
    deaths      integer not null,                       -- attempts that ended with the death of the process
    due_at      timestamptz,                            -- null: at once
    dead        boolean not null default false,
    changed_at  timestamptz not null default clock_timestamp(),
    primary key (consumer, event_id)
);
create index inbox_attempts_age on mailboat.inbox_attempts (consumer, changed_at);

-- Up to which position a pull hands out one event (or group) at a time, since a consumer died with the events before it.
alter table mailboat.cursors add column suspect_until bigint;
-- Parked events that are handled in one transaction or not at all; null: the event stands alone.
alter table mailboat.parked add column unit bigint;
create index parked_event on mailboat.parked (subscription_id, event_id);

-- What mailboat.pull returns.
create type mailboat.pulled as (
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
    partition       integer,
    attempt         integer,                            -- 1: the first
    redeliveries    integer,                            -- earlier pulls of this batch that did not commit
    replay          boolean,                            -- a dead letter that a person replayed
    group_label     text                                -- of delivery.groupBy; null: none
);

-- The same with what only the functions below need.
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

create type mailboat.stretch as (
    batch     mailboat.candidate[],                     -- matching events in order of position, one more than asked for
    upto      pg_snapshot,
    complete  boolean,                                  -- nothing matching lies behind the batch
    more      boolean,                                  -- the batch was cut: what comes next begins right behind it
    reach     bigint,                                   -- the walk came this far
    lowest    bigint,
    highest   bigint
);

-- ---- who calls ------------------------------------------------------------------------------------------------------

-- The role that the caller acts as. (current_user is the owner in a function with its owner's rights.)
create function mailboat.caller() returns name
    language sql stable
    set search_path = pg_catalog, pg_temp
    return case when current_setting('role') in ('none', '') then session_user else current_setting('role')::name end;

-- Raises unless the caller may act as this consumer: by a grant, as the relay of the subscription's outbox, or as the owner of
-- the schema. `of_outbox` is empty for a name that is used with mailboat.once.
create function mailboat.check_consumer(consumer text, of_outbox text) returns void
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_has_role(mailboat.caller(), (select nspowner from pg_namespace where nspname = 'mailboat'), 'usage')
       or exists (select from mailboat.outboxes o join pg_roles r on r.rolname = o.relay
                  where o.name = of_outbox and pg_has_role(mailboat.caller(), r.oid, 'usage'))
       or exists (select from mailboat.consumer_grants g join pg_roles r on r.rolname = g.role
                  where g.consumer = check_consumer.consumer and g.outbox = of_outbox
                    and pg_has_role(mailboat.caller(), r.oid, 'usage'))
    then
        return;
    end if;
    raise exception 'role % may not consume %', mailboat.caller(), consumer
        using errcode = 'insufficient_privilege',
              hint = format('The owner of schema mailboat can allow it: select mailboat.grant_consumer(%L, %L);',
                            consumer, mailboat.caller());
end
$$;

-- The outbox of a subscription; empty if there is none of that name. Raises if there are several.
create function mailboat.outbox_of(consumer text) returns text
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    outboxes text[] := array(select s.outbox from mailboat.subscriptions s where s.name = consumer and s.retired_at is null);
begin
    if cardinality(outboxes) > 1 then
        raise exception 'subscription % exists in several outboxes', consumer
            using errcode = 'ambiguous_parameter', hint = 'Name the one that is meant: outbox => ''...''.';
    end if;
    return coalesce(outboxes[1], '');
end
$$;

-- Allows a role to pull a subscription, or to use mailboat.once under a name. The role must be in mailboat_consumer as well.
create function mailboat.grant_consumer(consumer text, role text, outbox text default null) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regrole(quote_ident(role)) is null then
        raise exception 'there is no role %', role using errcode = 'undefined_object';
    end if;
    insert into mailboat.consumer_grants (consumer, outbox, role)
    values (grant_consumer.consumer, coalesce(grant_consumer.outbox, mailboat.outbox_of(grant_consumer.consumer)),
            grant_consumer.role::name)
    on conflict do nothing;
end
$$;

create function mailboat.revoke_consumer(consumer text, role text) returns void
    language sql
    set search_path = pg_catalog, pg_temp
    begin atomic
        delete from mailboat.consumer_grants g
        where g.consumer = revoke_consumer.consumer and g.role = revoke_consumer.role::name;
    end;

-- The subscription, for a caller who may consume it.
create function mailboat.pull_subscription(subscription text, outbox text) returns mailboat.subscriptions
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    its_outbox text := coalesce(pull_subscription.outbox, mailboat.outbox_of(subscription));
    s          mailboat.subscriptions;
begin
    perform mailboat.check_consumer(subscription, its_outbox);
    select m.* into s
    from mailboat.subscriptions m
    where m.name = subscription and m.retired_at is null and m.outbox = its_outbox;
    if not found then
        raise exception 'there is no subscription %', subscription
            using errcode = 'undefined_object', hint = 'Declare it: mailboat migrate -f <manifests>.';
    end if;
    return s;
end
$$;

-- Its policy. Reading a table may run functions of that table's owner (of the types of its columns, of its row security), and
-- consumers read with the rights of the schema's owner: so they read no table but that owner's. The lock keeps the table.
create function mailboat.pull_policy(s mailboat.subscriptions) returns mailboat.pull_policies
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    p mailboat.pull_policies;
    stranger name;
begin
    select m.* into p from mailboat.pull_policies m where m.subscription_id = s.id;
    if not found then
        raise exception 'subscription % is delivered by relays, not pulled', s.name
            using errcode = 'wrong_object_type',
                  hint = 'Its manifest must say sink: {pull: {}}; then run mailboat migrate -f <manifests>.';
    end if;
    execute format('lock table only %s in access share mode', to_regclass(s.outbox));
    select pg_get_userbyid(c.relowner) into stranger
    from pg_class c, pg_namespace m
    where c.oid = to_regclass(s.outbox) and m.nspname = 'mailboat' and (c.relowner <> m.nspowner or c.relkind not in ('r', 'p'));
    if found then
        raise exception 'outbox % is owned by %, and is pulled with the rights of the owner of schema mailboat', s.outbox, stranger
            using errcode = 'insufficient_privilege', hint = 'If the table is as it should be, give it to that owner: alter table ... owner to ...';
    end if;
    return p;
end
$$;

-- ---- reading a window -----------------------------------------------------------------------------------------------

-- The label of an event's group; null: it belongs to none. `group_by` names headers, or tags of the form name=value.
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

-- The outbox as something to select from, under Mailboat's names for its columns. A table of somebody's own may have other
-- types in them, and leave some empty.
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
                     ('headers', 'mailboat.kept_headers(%s::text)'), ('tags', 'coalesce(%s::text[], ''{}'')'),
                     ('traceparent', '%s::text')) c(name, read_as)) end;

-- What must hold for a row `e` that the subscription wants.
create function mailboat.pull_wanted(s mailboat.subscriptions, p mailboat.pull_policies) returns text
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

-- The statements that read events, as functions of one subscription: Postgres keeps their plans. Planning a statement on a
-- table with a partition per day takes longer than to read a hundred events of it. Made with the declaration of the
-- subscription, and again when its table or filter changes.
--
-- probe_<id>: which closed cursors have matching events to read. tail_<id>: what became visible since `done`. walk_<id>: a
-- stretch of the positions of an open window. The union has the events of transactions that were running at `done`, which come
-- late: where there was none, half of the plan is left out.
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
    wanted := mailboat.pull_wanted(s, p);
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
             'subscription bigint, partitions integer, most bigint, out scanned bigint, out tip pg_snapshot, out hits integer[],'
             ' out closed integer[], out dones text[], out seen_late boolean',
             'exists (select from mailboat.cursors m, pg_snapshot_xip(m.done) where m.subscription_id = $1 and m.upto is null)',
             $probe$
             with mine as materialized (
                 select m.partition, m.done from mailboat.cursors m where m.subscription_id = $1 and m.upto is null
             ), edge as materialized (
                 select min(pg_snapshot_xmax(done)::text::numeric)::text::xid8 as xmax from mine
             ), found as materialized (%4$s
                 select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %1$s as e
                 where e.xid >= (select xmax from edge)
                 limit $3 + 1
             )
             select (select count(*) from found), pg_current_snapshot(),
                    array(select h.partition from (
                        select distinct mine.partition from found as e join mine on mine.partition = e.slot %% $2
                        where not pg_visible_in_snapshot(e.xid, mine.done) and pg_visible_in_snapshot(e.xid, pg_current_snapshot())
                          and %2$s) h order by random()),
                    (select array_agg(partition order by partition) from mine),
                    (select array_agg(done::text order by partition) from mine),
                    (select bool_or(exists (select pg_snapshot_xip(done))) from mine)
             into scanned, tip, hits, closed, dones, seen_late$probe$,
             $late$
                 select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %s as e
                 where e.xid = any (array(select distinct pg_snapshot_xip(done) from mine)) and e.xid < (select xmax from edge)
                 union all$late$),
            -- At most 32 MiB of payload, or one event. Groups are whole, whatever they take.
            ('tail',
             'done pg_snapshot, reading bigint, partitions integer, of_partition integer, most integer, out scanned bigint,'
             ' out upto pg_snapshot, out batch mailboat.candidate[], out lowest bigint, out highest bigint, out matching bigint',
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
             into scanned, upto, batch, lowest, highest, matching$tail$,
             $late$
                 select e.*, true as late from %s as e
                 where e.xid = any (array(select pg_snapshot_xip($1))) and pg_visible_in_snapshot(e.xid, pg_current_snapshot())
                 union all$late$),
            ('walk',
             'done pg_snapshot, upto pg_snapshot, "position" bigint, lowest bigint, reach bigint, debts jsonb, partitions integer,'
             ' of_partition integer, most integer, out batch mailboat.candidate[], out matching bigint',
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

-- The next events of a cursor that the caller has locked: at most `most` and one more, in order of position. A closed cursor
-- reads what became visible since `done`; an open one goes on along the primary key. Where that is more than one read the
-- result has bounds and no events: the window is to be opened and read again.
create function mailboat.read_stretch(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, most integer
) returns mailboat.stretch
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    found    mailboat.stretch;
    scanned  bigint;
    matching bigint;
    reading  constant bigint := 2000;                    -- rows of any partition that are read to be sorted
    source   constant text := mailboat.pull_rows(s.outbox, p.columns);
begin
    if c.upto is null then
        execute format('select * from mailboat.tail_%s($1, $2, $3, $4, $5)', s.id)
        using c.done, reading + 1, s.partitions, c.partition, most
        into scanned, found.upto, found.batch, found.lowest, found.highest, matching;
        if scanned > reading then
            found.batch := null;
            if c.done::text = '3:3:' then
                execute format('select pg_current_snapshot(), min(e.id), max(e.id) from %s as e', source)
                into found.upto, found.lowest, found.highest;
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
    -- A bounded range of positions at a time: where few events match, the walk must not take longer than a statement may.
    found.reach := least(c.highest, greatest(c.position, c.lowest - 1) + 100000);
    execute format('select * from mailboat.walk_%s($1, $2, $3, $4, $5, $6, $7, $8, $9)', s.id)
    using c.done, c.upto, c.position, c.lowest, found.reach, c.debts, s.partitions, c.partition, most
    into found.batch, matching;
    if cardinality(found.batch) = 0 and found.reach < c.highest then
        execute format('select min(e.id) - 1 from %s as e where e.id > $1', source) using found.reach into found.reach;
        found.reach := least(coalesce(found.reach, c.highest), c.highest);
    end if;
    found.upto := c.upto;
    found.lowest := c.lowest;
    found.highest := c.highest;
    found.more := matching > least(cardinality(found.batch), most);
    found.complete := found.reach >= c.highest and not found.more;
    return found;
end
$$;

-- Where a large window has to be walked; see `span` in sql/windows.sql. `offset 0` is a fence: without it the planner walks
-- the primary key from its beginning to find a minimum.
create function mailboat.window_bounds(rows_ text, c mailboat.cursors) returns mailboat.stretch
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    found mailboat.stretch;
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
    using c.done, c.upto
    into found.upto, found.lowest, found.highest;
    return found;
end
$$;

-- How many events of a batch may be handed out without cutting a group; null: the last group goes on behind the batch.
-- A group of headers or tags is a run of neighbours; a transaction's events may have others between them.
create function mailboat.uncut(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, found mailboat.stretch, most integer
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
                       mailboat.pull_rows(s.outbox, p.columns), s.partitions, c.partition, mailboat.pull_wanted(s, p))
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

-- ---- events that are set aside --------------------------------------------------------------------------------------

-- Seconds until the next attempt, as relays compute them.
create function mailboat.pull_backoff(p mailboat.pull_policies, failures integer) returns double precision
    language sql volatile
    set search_path = pg_catalog, pg_temp
    return least(p.backoff_initial * p.backoff_factor ^ least(greatest(failures, 1) - 1, 64), p.backoff_max)
           * (1 + p.backoff_jitter * (2 * random() - 1));

-- Parks one event. `due`: when it is tried; null: it waits behind its key's head.
create function mailboat.park_event(
    s mailboat.subscriptions, c mailboat.cursors, e mailboat.candidate, sequence bigint, unit bigint, attempts integer,
    due timestamptz, reason text, error text
) returns bigint
    language sql
    set search_path = pg_catalog, pg_temp
    begin atomic
        insert into mailboat.parked (
            subscription_id, partition, unit, attempts, next_attempt_at, sequence, series_partition, series_generation,
            first_failed_at, last_failed_at, reason, last_error, id, event_id, event_type, aggregate_type, aggregate_id, key,
            payload, content_type, headers, tags, traceparent, created_at, slot)
        values (
            s.id, c.partition, park_event.unit, attempts, due, park_event.sequence, c.partition, s.generation,
            case when reason is not null then clock_timestamp() end, case when reason is not null then clock_timestamp() end,
            reason, error, (e).position, (e).event_id, (e).event_type, (e).aggregate_type, (e).aggregate_id, (e).key, (e).payload,
            (e).content_type, (e).headers, (e).tags, (e).traceparent, (e).created_at, (e).slot)
        returning ordinal;
    end;

-- Whether an event of the same key stands before a parked one. The order of a key's queue: replayed events first, in their old
-- order, then as they were parked. Members of its own group do not count.
create function mailboat.waits_behind(p mailboat.parked) returns boolean
    language sql stable
    set search_path = pg_catalog, pg_temp
    return p.key is not null and exists (
        select from mailboat.parked q
        where q.subscription_id = p.subscription_id and q.partition = p.partition and q.key = p.key
          and mailboat.key_slot(q.key, 0) = mailboat.key_slot(p.key, 0)
          and coalesce(q.unit <> p.unit, true)
          and (q.rank, case when q.rank = 0 then q.id else 0 end, q.ordinal) < (p.rank, case when p.rank = 0 then p.id else 0 end, p.ordinal));

-- The head of each of these keys gets a time, if it waited behind one that is gone.
create function mailboat.line_up(subscription bigint, of_partition integer, keys text[]) returns void
    language sql
    set search_path = pg_catalog, pg_temp
    begin atomic
        update mailboat.parked p
        set next_attempt_at = clock_timestamp()
        where p.subscription_id = subscription and p.partition = of_partition and p.next_attempt_at is null and not p.blocked
          and p.ordinal in (
            select distinct on (q.key) q.ordinal
            from mailboat.parked q
            where q.subscription_id = subscription and q.partition = of_partition and q.key = any (keys)
              and mailboat.key_slot(q.key, 0) = any (array(select mailboat.key_slot(k, 0) from unnest(keys) k))
            order by q.key, q.rank, case when q.rank = 0 then q.id end, q.ordinal);
    end;

-- A payload as JSON, exactly as it was written; null if it is not JSON.
create function mailboat.json_payload(payload bytea, content_type text) returns json
    language plpgsql immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case when mailboat.is_json(content_type) then convert_from(payload, 'UTF8')::json end;
exception when data_exception or program_limit_exceeded then
    return null;
end
$$;

-- A dead letter as one document. A payload that is JSON is embedded as it was written, any other is encoded as base64. One of
-- more than 512 KiB is left out, so that the document fits into an event and a message; the table keeps it.
create function mailboat.dead_letter_document(letter mailboat.dead_letters) returns json
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
    set timezone = 'UTC'
as $$
declare
    s        mailboat.subscriptions;
    size     constant integer := octet_length(letter.payload);
    embedded constant json := case when size <= 524288 then mailboat.json_payload(letter.payload, letter.content_type) end;
begin
    select m.* into s from mailboat.subscriptions m where m.id = letter.subscription_id;
    return json_build_object(
        'originalEvent', json_build_object(
            'id', letter.event_id, 'type', letter.event_type, 'key', letter.key, 'aggregateType', letter.aggregate_type,
            'aggregateId', letter.aggregate_id, 'createdAt', letter.created_at, 'contentType', letter.content_type,
            'headers', letter.headers, 'tags', letter.tags, 'traceparent', letter.traceparent, 'payload', embedded,
            'payloadBase64', case when embedded is null and size <= 524288
                                  then translate(encode(letter.payload, 'base64'), E'\n', '') end,
            'payloadBytes', size),
        'reason', letter.reason,
        'failedAt', letter.last_failed_at,
        'error', letter.last_error,
        'attempts', letter.attempts,
        'consumer', s.name,
        'source', json_build_object('outbox', s.outbox, 'position', letter.id, 'partition', letter.partition,
                                    'deadLetter', letter.dead_id));
end
$$;

-- Emits dead letters as events, in the transaction that gives up on them: another subscription carries them to a topic. They
-- keep the key of the event. The dead letter of such an event is not emitted, whichever subscription it is of.
create function mailboat.emit_dead(s mailboat.subscriptions, dead_ids bigint[]) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    execute format($emit$
        insert into %s (event_type, aggregate_type, aggregate_id, key, payload, tags)
        select 'mailboat.dead-letter', d.aggregate_type, d.aggregate_id, d.key,
               convert_to(mailboat.dead_letter_document(d)::text, 'UTF8'), array['dead-letter-of=' || $2, 'reason=' || d.reason]
        from mailboat.dead_letters d
        where d.dead_id = any ($1) and d.event_type <> 'mailboat.dead-letter'
        order by d.dead_id$emit$, to_regclass(s.outbox))
    using dead_ids, s.name;
end
$$;

-- Gives up on parked events, or blocks their key, as onExhausted says; then their keys go on.
create function mailboat.give_up(
    s mailboat.subscriptions, p mailboat.pull_policies, of_partition integer, ordinals bigint[]
) returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    keys text[];
    letters bigint[];
begin
    if p.blocks then
        update mailboat.parked set blocked = true, next_attempt_at = null
        where subscription_id = s.id and ordinal = any (ordinals);
        return 'Blocked';
    end if;
    with gone as (
        delete from mailboat.parked where subscription_id = s.id and ordinal = any (ordinals) returning *
    ), dead as (
        insert into mailboat.dead_letters (
            subscription_id, partition, attempts, sequence, series_partition, series_generation, reason, last_error,
            first_failed_at, last_failed_at, id, event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type,
            headers, tags, traceparent, created_at, slot)
        select subscription_id, partition, attempts, sequence, coalesce(series_partition, partition),
               coalesce(series_generation, s.generation), coalesce(reason, 'HandlerFailed'), coalesce(last_error, ''),
               coalesce(first_failed_at, clock_timestamp()), coalesce(last_failed_at, clock_timestamp()), id, event_id,
               event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent, created_at, slot
        from gone order by id, ordinal
        returning dead_id
    )
    select (select array_agg(distinct key) filter (where key is not null) from gone), (select array_agg(dead_id) from dead)
    into keys, letters;
    if p.emits_dead then
        perform mailboat.emit_dead(s, letters);
    end if;
    perform mailboat.line_up(s.id, of_partition, keys);
    return 'DeadLettered';
end
$$;

-- ---- the attempt journal --------------------------------------------------------------------------------------------

-- A consumer that dies takes its transaction with it, so an attempt must be noted where a rollback does not reach: in a
-- sequence. Each cursor has two (for its window and for its parked events); the value is a hash of the state that the attempt
-- began in, how many began in that state, and when the last one did. Nobody else writes them: the writer has the cursor's
-- lock. For a second after an attempt began that was not heard of again its events are left alone: a consumer whose handler
-- failed has rolled back, and calls mailboat.refuse next.
create function mailboat.journal_name(subscription bigint, of_partition integer, kind text) returns text
    language sql immutable
    return format('mailboat.journal_%s_%s_%s', subscription, of_partition, kind);

-- Makes the journals that a pull subscription lacks, after its declaration or a change of its partitions.
create function mailboat.make_journals(subscription bigint) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
as $$
declare
    name text;
begin
    for name in
        select mailboat.journal_name(s.id, n, kind)
        from mailboat.subscriptions s join mailboat.pull_policies p on p.subscription_id = s.id,
             generate_series(0, s.partitions - 1) n, unnest(array['window', 'parked']) kind
        where s.id = subscription
    loop
        if to_regclass(name) is null then
            execute format('create sequence if not exists %s minvalue 0 cache 1', name);
        end if;
    end loop;
end
$$;

create function mailboat.drop_journals() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
as $$
declare
    name name;
begin
    for name in
        select c.relname from pg_class c
        where c.relnamespace = 'mailboat'::regnamespace and c.relkind = 'S'
          and c.relname ~ format('^journal_%s_\d+_(window|parked)$', old.subscription_id)
    loop
        execute format('drop sequence if exists mailboat.%I', name);
    end loop;
    foreach name in array array['probe', 'tail', 'walk'] loop
        execute format('drop function if exists mailboat.%I', name || '_' || old.subscription_id);
    end loop;
    return null;
end
$$;

create trigger drop_journals after delete on mailboat.pull_policies for each row execute function mailboat.drop_journals();

-- What a journal says: 26 bits of a hash of the state, 10 bits of a count, 27 bits of tenths of seconds. `begun` has the
-- count of each state that is asked for.
create function mailboat.journal_entry(journal text, states text[], out begun integer[], out lately boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    noted bigint;
begin
    begun := array_fill(0, array[cardinality(states)]);
    lately := false;
    if to_regclass(journal) is not null then
        execute 'select last_value from ' || journal into noted;
        for i in 1 .. cardinality(states) loop
            if (noted >> 37) = (hashtextextended(states[i], 0) & 67108863) then
                begun[i] := (noted >> 27) & 1023;
                lately := ((mailboat.tenths() - (noted & 134217727)) & 134217727) < 10;
            end if;
        end loop;
    end if;
end
$$;

create function mailboat.tenths() returns bigint
    language sql volatile
    set search_path = pg_catalog, pg_temp
    return (extract(epoch from clock_timestamp()) * 10)::bigint & 134217727;

-- Notes that one more attempt begins in this state. A rollback does not take this back.
create function mailboat.note_begin(journal text, state text, earlier integer) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regclass(journal) is not null then
        perform setval(journal, ((hashtextextended(state, 0) & 67108863) << 37) | (least(earlier + 1, 1023)::bigint << 27)
                                | mailboat.tenths());
    end if;
end
$$;

-- ---- pull -----------------------------------------------------------------------------------------------------------

-- The cursor of a partition, locked; nothing if another consumer has it, or a relay that is still alive.
create function mailboat.lock_cursor(subscription bigint, of_partition integer) returns mailboat.cursors
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    c mailboat.cursors;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        select m.* into c from mailboat.cursors m
        where m.subscription_id = subscription and m.partition = of_partition
        for no key update skip locked;
    else
        begin
            select m.* into c from mailboat.cursors m
            where m.subscription_id = subscription and m.partition = of_partition
            for no key update skip locked;
        exception when serialization_failure then
            return null;                                -- another consumer moved it since this transaction's snapshot
        end;
    end if;
    if c.owner is not null
       and exists (select from mailboat.relays r where r.id = c.owner and r.expires_at > clock_timestamp()) then
        return null;
    end if;
    if c.system_identifier <> (select system_identifier from pg_control_system())
       or c.database_oid <> mailboat.database_oid() then
        raise exception 'the cursors were written in another database; this one is a restored copy'
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'If this copy is the one to go on with, run: mailboat rebase -f <manifests>.';
    end if;
    return c;
end
$$;

-- The timeline of the server: a cursor that was not moved since a failover holds up retention.
create function mailboat.timeline() returns integer
    language sql volatile
    return ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer;

create function mailboat.save_cursor(c mailboat.cursors) returns void
    language sql
    set search_path = pg_catalog, pg_temp
    begin atomic
        update mailboat.cursors m
        set done = (c).done, upto = (c).upto, lowest = (c).lowest, highest = (c).highest, "position" = (c).position, hi = (c).hi,
            sequence = (c).sequence, debts = (c).debts, suspect_until = (c).suspect_until, resumes = 0, owner = null, epoch = null,
            released = true, timeline = mailboat.timeline()
        where m.subscription_id = (c).subscription_id and m.partition = (c).partition;
    end;

-- Closed cursors that have matching events to read, or may have: one read for all partitions. If there is none at all and the
-- caller says so, the cursors move past what is for others, so that the next look is short.
create function mailboat.fresh_partitions(s mailboat.subscriptions, p mailboat.pull_policies, moves boolean) returns integer[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    most    constant bigint := 500;
    scanned bigint;
    hits    integer[];
    closed  integer[];
    dones   text[];
    tip     pg_snapshot;
    late    boolean;
    seen_late boolean;
begin
    select array_agg(m.partition), bool_or(exists (select pg_snapshot_xip(m.done))) into closed, late
    from mailboat.cursors m
    where m.subscription_id = s.id and m.upto is null;
    if closed is null then
        return '{}';
    end if;
    execute format('select * from mailboat.probe_%s($1, $2, $3)', s.id)
    using s.id, s.partitions, most
    into scanned, tip, hits, closed, dones, seen_late;
    if scanned > most then
        return array(select unnest(closed) order by random());
    end if;
    -- A cursor that moved since the first look may have late events that this read did not look for.
    if scanned > 0 and moves and cardinality(hits) = 0 and (late or not seen_late) then
        begin
            update mailboat.cursors m
            set done = tip, timeline = mailboat.timeline()
            from (select n.subscription_id, n.partition
                  from mailboat.cursors n join unnest(closed, dones) seen(partition, done)
                    on n.partition = seen.partition and n.done::text = seen.done
                  where n.subscription_id = s.id and n.upto is null
                  for no key update of n skip locked) idle
            where m.subscription_id = idle.subscription_id and m.partition = idle.partition;
        exception when serialization_failure then
            null;
        end;
    end if;
    return hits;
end
$$;

-- Parked events whose time has come, of one key or one group; they leave the table with the consumer's commit. Null: an event
-- was given up, and that should be committed before anything else is tried.
create function mailboat.take_parked(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, most integer
) returns mailboat.pulled[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    head    mailboat.parked;
    journal constant text := mailboat.journal_name(s.id, c.partition, 'parked');
    state   text;
    died    integer;
    lately  boolean;
    members bigint[];
    taken   mailboat.pulled[];
    keys    text[];
begin
    select m.* into head
    from mailboat.parked m
    where m.subscription_id = s.id and m.partition = c.partition and m.next_attempt_at <= clock_timestamp() and not m.blocked
      and not (p.ordered and mailboat.waits_behind(m))
      and (m.unit is null or not exists (
            select from mailboat.parked u
            where u.subscription_id = m.subscription_id and u.partition = m.partition and u.unit = m.unit
              and (u.next_attempt_at > clock_timestamp() or p.ordered and mailboat.waits_behind(u))))
    order by m.next_attempt_at, m.ordinal
    limit 1;
    if not found then
        return '{}';
    end if;
    state := concat_ws('|', head.ordinal, head.attempts, head.next_attempt_at);
    select j.begun[1], j.lately into died, lately from mailboat.journal_entry(journal, array[state]) j;
    if died > 0 and lately then
        return '{}';
    end if;
    if head.unit is not null then
        members := array(select m.ordinal from mailboat.parked m
                         where m.subscription_id = s.id and m.partition = c.partition and m.unit = head.unit order by m.ordinal);
    elsif died = 0 and head.attempts = 0 and p.ordered and head.key is not null then
        -- Never tried: with all that is behind it, up to one that was tried.
        members := array(
            select q.ordinal
            from (select m.ordinal, bool_and(m.unit is null and m.attempts = 0 and not m.blocked
                                             and coalesce(m.next_attempt_at <= clock_timestamp(), true)) over w
                         and (row_number() over w = 1 or sum(octet_length(m.payload)) over w <= 33554432) as goes,
                         row_number() over w as place
                  from mailboat.parked m
                  where m.subscription_id = s.id and m.partition = c.partition and m.key = head.key
                    and mailboat.key_slot(m.key, 0) = mailboat.key_slot(head.key, 0)
                  window w as (order by m.rank, case when m.rank = 0 then m.id end, m.ordinal rows unbounded preceding)
                  limit most) q
            where q.goes order by q.place);
    else
        members := array[head.ordinal];
    end if;
    if died > 0 and head.attempts + died >= p.max_attempts then
        update mailboat.parked m
        set attempts = head.attempts + died, reason = 'ConsumerDied', last_error = mailboat.death_note(died),
            first_failed_at = coalesce(first_failed_at, clock_timestamp()), last_failed_at = clock_timestamp()
        where m.subscription_id = s.id and m.ordinal = any (members);
        perform mailboat.give_up(s, p, c.partition, members);
        return null;
    end if;
    perform mailboat.note_begin(journal, state, died);
    with gone as (
        delete from mailboat.parked m where m.subscription_id = s.id and m.ordinal = any (members) returning m.*
    )
    select array_agg(row(g.id, g.event_id, g.event_type, g.aggregate_type, g.aggregate_id, g.key, g.payload, g.content_type,
                         g.headers, g.tags, g.traceparent, g.created_at, c.partition, g.attempts + died + 1, died, g.replay,
                         mailboat.group_label(p.group_by, g.headers, g.tags, null))::mailboat.pulled
                     order by array_position(members, g.ordinal)),
           array_agg(distinct g.key) filter (where g.key is not null)
    into taken, keys
    from gone g;
    perform mailboat.line_up(s.id, c.partition, keys);
    return taken;
end
$$;

create function mailboat.death_note(times integer) returns text
    language sql immutable
    return format('consumers died, or rolled back without mailboat.refuse, %s times with this event in hand', times);

-- The next events of the cursor's window; the cursor moves with the consumer's commit. Events behind a parked one of their key
-- are parked too, and so are those that were refused. Null: as in take_parked.
create function mailboat.take_window(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, most integer
) returns mailboat.pulled[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    journal   constant text := mailboat.journal_name(s.id, c.partition, 'window');
    state     constant text := concat_ws('|', s.generation, c.done, c.position);
    stretch   mailboat.stretch;
    reading   integer;
    cut       integer;
    passed    integer;
    last      integer;
    next      integer;
    ends      integer[];
    handed    integer := 0;                             -- events that are handed out
    taken     integer[] := '{}';                        -- their places in the batch, if not all are
    ids       uuid[];                                   -- of the batch, by place; so are the keys
    keys      text[];
    refused   uuid[];                                   -- events of the batch that a consumer refused
    held      text[];                                   -- keys of the batch that wait behind a parked event
    aside     boolean;
    noted     mailboat.refusals;
    singles   boolean;
    died      integer;
    begun     integer;                                  -- attempts with one event, or group, in hand
    in_batch  integer := 0;                             -- attempts with the whole batch in hand
    lately    boolean;
    returned  integer := 0;
    ordinals  bigint[];
    waits     boolean;
    parks     boolean;
    gives_up  boolean;
    buried    boolean := false;
begin
    for round in 1 .. 20 loop
        reading := most;
        loop
            stretch := mailboat.read_stretch(s, p, c, reading);
            if stretch.batch is null and stretch.highest is not null then
                c."position" := case when c.upto is null then 0 else c.position end;
                c.upto := stretch.upto;
                c.lowest := stretch.lowest;
                c.highest := stretch.highest;
                continue;
            end if;
            if stretch.batch is null then               -- a window that turned out to be empty
                stretch.batch := '{}';
                stretch.complete := true;
                stretch.more := false;
            end if;
            cut := case when p.group_by = '{}' then least(most, cardinality(stretch.batch))
                        else mailboat.uncut(s, p, c, stretch, most) end;
            exit when cut is not null and cut <= greatest(most, p.max_group);
            if cut is not null or reading >= p.max_group then
                raise exception 'a group of subscription % has more than % events', s.name, p.max_group
                    using errcode = 'program_limit_exceeded',
                          detail = format('It begins with event %s.', (stretch.batch[1]).event_id),
                          hint = 'Group by something narrower, or raise spec.sink.pull.maxGroup.';
            end if;
            reading := least(reading * 4, p.max_group);
        end loop;

        passed := cut;
        if cut > 0 then
            aside := false;
            ids := null;
            if exists (select from mailboat.refusals r where r.subscription_id = s.id)
               or exists (select from mailboat.parked m where m.subscription_id = s.id and m.partition = c.partition) then
                select array_agg(u.event_id order by u.place), array_agg(u.key order by u.place),
                       array(select distinct v.key
                             from unnest(stretch.batch) v
                             where p.ordered and v.key is not null and v.position <= (stretch.batch[cut]).position
                               and exists (select from mailboat.parked m
                                           where m.subscription_id = s.id and m.partition = c.partition
                                             and mailboat.key_slot(m.key, 0) = v.slot and m.key = v.key))
                into ids, keys, held
                from unnest(stretch.batch) with ordinality
                     u("position", event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
                       traceparent, created_at, slot, xid, group_label, place)
                where u.place <= cut;
                select coalesce(array_agg(r.event_id), '{}'), returned + coalesce(sum(r.returns), 0) into refused, returned
                from mailboat.refusals r
                where r.subscription_id = s.id and r.event_id = any (ids);
                aside := cardinality(refused) > 0 or cardinality(held) > 0;
            end if;
            select j.begun[1], j.begun[2], j.lately into begun, in_batch, lately
            from mailboat.journal_entry(journal, array[state || '|single', state || '|batch']) j;
            died := greatest(begun - returned, 0);
            singles := begun > 0 or (stretch.batch[1]).position <= c.suspect_until or in_batch > returned;
            if round = 1 and greatest(begun, in_batch) > returned and lately then
                return '{}';
            end if;

            if not aside and not singles then
                handed := cut;
            else
                if ids is null then
                    ids := array(select u.event_id from unnest(stretch.batch) u limit cut);
                    keys := array(select u.key from unnest(stretch.batch) u limit cut);
                    refused := '{}';
                    held := '{}';
                end if;
                -- The end of each event's group, by its place in the batch.
                ends := case when cardinality(p.group_by) > 0 then array(
                    select case when u.group_label is null then u.place
                                when p.group_by = '{transaction}' then max(u.place) over (partition by u.group_label)
                                else max(u.place) over (partition by u.group_label, u.run) end
                    from (select b.group_label, b.place::integer as place,
                                 b.place - row_number() over (partition by b.group_label order by b.place) as run
                          from unnest(stretch.batch) with ordinality
                               b("position", event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type,
                                 headers, tags, traceparent, created_at, slot, xid, group_label, place)
                          where b.place <= cut) u
                    order by u.place) end;
                parks := false;
                next := 1;
                while next <= cut loop
                    last := coalesce(ends[next], next);
                    for i in next + 1 .. cut loop
                        exit when i > last;
                        last := greatest(last, ends[i]);
                    end loop;
                    noted := null;
                    if ids[next:last] && refused then
                        select r.* into noted
                        from mailboat.refusals r
                        where r.subscription_id = s.id and r.event_id = any (ids[next:last])
                        order by r.final desc, r.failures desc, r.due_at desc nulls last
                        limit 1;
                        delete from mailboat.refusals r where r.subscription_id = s.id and r.event_id = any (ids[next:last]);
                    end if;
                    waits := keys[next:last] && held;
                    gives_up := noted.final or noted.failures >= p.max_attempts;
                    if singles and handed = 0 and died > 0 and died + 1 >= p.max_attempts
                       and coalesce(noted.failures = 0 and noted.due_at is null and not noted.final, true) and not waits then
                        noted.failures := died + 1;
                        noted.due_at := clock_timestamp();
                        noted.reason := 'ConsumerDied';
                        noted.error := mailboat.death_note(died + 1);
                        gives_up := true;
                        buried := true;
                    end if;
                    if noted.failures > 0 or noted.due_at is not null or noted.final or waits then
                        ordinals := array(
                            select mailboat.park_event(
                                s, c, u.e, c.sequence + u.place, case when last > next then (stretch.batch[next]).position end,
                                coalesce(noted.failures, 0),
                                case when noted.reason is null and noted.due_at is null
                                     then case when (u.e).key is null or not p.ordered then clock_timestamp() end
                                     when u.place = next then coalesce(noted.due_at, clock_timestamp()) end,
                                noted.reason, noted.error)
                            from (select row(b."position", b.event_id, b.event_type, b.aggregate_type, b.aggregate_id, b.key,
                                             b.payload, b.content_type, b.headers, b.tags, b.traceparent, b.created_at, b.slot,
                                             b.xid, b.group_label)::mailboat.candidate as e, b.place + next - 1 as place
                                  from unnest(stretch.batch[next:last]) with ordinality
                                       b("position", event_id, event_type, aggregate_type, aggregate_id, key, payload,
                                         content_type, headers, tags, traceparent, created_at, slot, xid, group_label, place)
                                  order by b.place) u);
                        parks := true;
                        if gives_up then
                            perform mailboat.give_up(s, p, c.partition, ordinals);
                        end if;
                        if p.ordered and (not coalesce(gives_up, false) or p.blocks) then
                            held := held || array_remove(keys[next:last], null);
                        end if;
                    else
                        taken := taken || array(select generate_series(next, last));
                        handed := cardinality(taken);
                    end if;
                    passed := last;
                    next := last + 1;
                    exit when buried or singles and handed > 0;
                end loop;
                if parks and cardinality(held) > 0 then
                    perform mailboat.line_up(s.id, c.partition, held);
                end if;
                c.suspect_until := case when singles then greatest(c.suspect_until, (stretch.batch[cut]).position) end;
                c.suspect_until := case when c.suspect_until > (stretch.batch[passed]).position then c.suspect_until end;
            end if;
            c.sequence := c.sequence + passed;
            c.hi := greatest(c.hi, (stretch.batch[passed]).position);
        end if;

        if passed < cardinality(stretch.batch) or stretch.more then
            c.upto := stretch.upto;
            c.lowest := stretch.lowest;
            c.highest := stretch.highest;
            c."position" := case when passed = 0 then c.position else (stretch.batch[passed]).position end;
        elsif stretch.complete then
            c.done := stretch.upto;
            c.upto := null;
            c.lowest := null;
            c.highest := null;
            c.debts := null;
            c."position" := 0;
        else
            c."position" := stretch.reach;
        end if;
        exit when buried or handed > 0 or c.upto is null;
    end loop;

    perform mailboat.save_cursor(c);
    if buried then
        return null;
    end if;
    if handed = 0 then
        return '{}';
    end if;
    perform mailboat.note_begin(journal, state || case when singles then '|single' else '|batch' end,
                                case when singles then begun else in_batch end);
    return array(
        select row(u."position", u.event_id, u.event_type, u.aggregate_type, u.aggregate_id, u.key, u.payload, u.content_type,
                   u.headers, u.tags, u.traceparent, u.created_at, c.partition, died + 1, greatest(begun, in_batch), false,
                   u.group_label)::mailboat.pulled
        from unnest(stretch.batch) with ordinality
             u("position", event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
               traceparent, created_at, slot, xid, group_label, place)
        where case when handed = passed then u.place <= passed else u.place = any (taken) end
        order by u.place);
end
$$;

-- The next events of one free partition, for the caller's transaction: their effects and the progress commit together, or not
-- at all. Nothing comes back while the subscription is paused, while all partitions are taken, and while there is nothing new;
-- commit then too, and call again later (LISTEN mailboat shortens the wait, see mailboat.beat).
create function mailboat.pull(subscription text, max_events integer default null, outbox text default null)
    returns setof mailboat.pulled
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off                         -- made whole before the first row comes and a limit can end it
    set plan_cache_mode = force_generic_plan            -- of the readers: see mailboat.make_readers
as $$
declare
    s      mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
    p      mailboat.pull_policies := mailboat.pull_policy(s);
    most   integer := coalesce(max_events, p.batch_size);
    c      mailboat.cursors;
    ready  integer[];
    fresh  boolean;
    listed integer[];
    chosen integer;
    taken  mailboat.pulled[];
begin
    if most not between 1 and 10000 then
        raise exception 'max_events must be between 1 and 10000, not %', most using errcode = 'invalid_parameter_value';
    end if;
    if s.state = 'Paused' then
        return;
    end if;
    -- Partitions with an open window or due parked events first, or those with new events: by chance, so that a large backlog
    -- of one partition does not keep the others waiting.
    ready := array(
        select m.partition from mailboat.cursors m
        where m.subscription_id = s.id
          and (m.upto is not null
               or exists (select from mailboat.parked d
                          where d.subscription_id = s.id and d.partition = m.partition and d.next_attempt_at <= clock_timestamp()))
        order by random());
    fresh := random() >= cardinality(ready)::double precision / s.partitions;
    for turn in 1 .. 2 loop
        listed := case when fresh then mailboat.fresh_partitions(s, p, moves => cardinality(ready) = 0) else ready end;
        foreach chosen in array coalesce(listed, '{}') loop
            c := mailboat.lock_cursor(s.id, chosen);
            continue when c.partition is null;
            -- Under the lock nobody repartitions or retires it: what is read now belongs together.
            select m.* into s from mailboat.subscriptions m where m.id = s.id;
            if s.state = 'Paused' then
                return;
            end if;
            taken := mailboat.take_parked(s, p, c, most);
            if cardinality(taken) = 0 then
                taken := mailboat.take_window(s, p, c, most);
            end if;
            if taken is null then
                return;
            elsif cardinality(taken) > 0 then
                perform set_config('mailboat.pulled', s.id::text, true);
                return query select * from unnest(taken);
                return;
            end if;
        end loop;
        fresh := not fresh;
    end loop;
end
$$;

-- ---- refuse ---------------------------------------------------------------------------------------------------------

-- An event could not be handled. To be called after the rollback of the transaction that pulled it, in one of its own: counts the
-- attempt, parks the event and what follows of its key, and makes it a dead letter when attempts are used up or `final` is
-- true. `retry_in` overrides the back-off; `counted => false` returns the event without counting an attempt.
-- Returns Parked, DeadLettered, Blocked, or Noted: the next pull of its partition sets it aside.
create function mailboat.refuse(
    subscription text, event_id uuid, error text, reason text default 'HandlerFailed', final boolean default false,
    retry_in interval default null, counted boolean default true, outbox text default null
) returns text
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s        mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
    p        mailboat.pull_policies := mailboat.pull_policy(s);
    it       mailboat.parked;
    members  bigint[];
    tries    integer;
begin
    if current_setting('mailboat.pulled', true) = s.id::text then
        raise exception 'mailboat.refuse: this transaction has pulled events of %: roll it back first', s.name
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'The pull counts the event as handled when it commits. Call mailboat.refuse in a transaction of its own.';
    end if;
    refuse.error := left(coalesce(refuse.error, ''), 16384);
    refuse.reason := left(coalesce(refuse.reason, 'HandlerFailed'), 128);
    select m.* into it from mailboat.parked m where m.subscription_id = s.id and m.event_id = refuse.event_id;
    if found then
        perform from mailboat.cursors m where m.subscription_id = s.id and m.partition = it.partition for no key update;
        select m.* into it from mailboat.parked m where m.subscription_id = s.id and m.event_id = refuse.event_id;
    end if;
    if not found then
        insert into mailboat.refusals as r (subscription_id, event_id, failures, returns, due_at, final, reason, error)
        values (s.id, refuse.event_id, counted::integer, 1,
                case when retry_in is not null then clock_timestamp() + retry_in
                     when counted then clock_timestamp() + make_interval(secs => mailboat.pull_backoff(p, 1)) end,
                refuse.final, refuse.reason, refuse.error)
        on conflict on constraint refusals_pkey do update
        set failures = r.failures + excluded.failures, returns = r.returns + 1, due_at = coalesce(excluded.due_at, r.due_at),
            final = r.final or excluded.final, reason = excluded.reason, error = excluded.error, last_at = clock_timestamp();
        return 'Noted';
    end if;
    members := array(select m.ordinal from mailboat.parked m
                     where m.subscription_id = s.id and m.partition = it.partition
                       and (m.ordinal = it.ordinal or m.unit = it.unit) order by m.ordinal);
    tries := it.attempts + counted::integer;
    update mailboat.parked m
    set attempts = tries, reason = refuse.reason, last_error = refuse.error,
        first_failed_at = coalesce(m.first_failed_at, clock_timestamp()), last_failed_at = clock_timestamp(),
        next_attempt_at = case when m.ordinal = members[1] then clock_timestamp() + coalesce(
            retry_in, case when counted then make_interval(secs => mailboat.pull_backoff(p, tries)) else interval '0' end) end
    where m.subscription_id = s.id and m.ordinal = any (members);
    if refuse.final or tries >= p.max_attempts then
        return mailboat.give_up(s, p, it.partition, members);
    end if;
    return 'Parked';
end
$$;

-- ---- once -----------------------------------------------------------------------------------------------------------

-- Whether an event is new to a consumer; it is marked as handled, in the caller's transaction. For consumers that get their
-- events from elsewhere: true means do it, false means it was done.
create function mailboat.once(consumer text, event_id uuid) returns boolean
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    insert into mailboat.handled (consumer, event_id) values (once.consumer, once.event_id)
    on conflict on constraint handled_pkey do nothing;
    return found;
end
$$;

-- Takes a mark of mailboat.once back, so that the event is handled again. True if there was one.
create function mailboat.forget(consumer text, event_id uuid) returns boolean
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.handled h where h.consumer = forget.consumer and h.event_id = forget.event_id;
    return found;
end
$$;

-- Deletes marks of mailboat.once, and attempts of an inbox, that are older than any redelivery can be: the oldest ones, up to
-- `most`. Returns how many; fewer than `most` means that none is left.
create function mailboat.prune_handled(consumer text, older_than interval default '30 days', most integer default 10000)
    returns bigint
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    pruned bigint;
    more   bigint;
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.handled h
    where h.ctid = any (array(select o.ctid from mailboat.handled o
                              where o.consumer = prune_handled.consumer and o.handled_at < clock_timestamp() - older_than
                              order by o.handled_at limit most for update skip locked));
    get diagnostics pruned = row_count;
    delete from mailboat.inbox_attempts a
    where a.ctid = any (array(select o.ctid from mailboat.inbox_attempts o
                              where o.consumer = prune_handled.consumer and o.changed_at < clock_timestamp() - older_than
                              order by o.changed_at limit most - pruned for update skip locked));
    get diagnostics more = row_count;
    return pruned + more;
end
$$;

-- ---- inbox: attempts of consumers behind a broker -------------------------------------------------------------------

-- Which of these events may be handled now, each with its attempt; they are noted as running. `running` are the events that
-- the process has in hand already, `replays` those of `event_ids` that a person replayed. States: claimed; done; dead; wait.
-- Two processes may get the same event at once in a race: mailboat.once lets one of them wait for the other.
create function mailboat.inbox_claim(
    consumer text, instance text, life text, lease interval, running uuid[], event_ids uuid[], replays uuid[],
    out event_id uuid, out state text, out attempt integer, out deaths integer, out wait double precision
) returns setof record
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform mailboat.check_consumer(inbox_claim.consumer, '');
    -- Processes that died, and earlier lives of this one. Locked in one order, so that two that do this at once do not deadlock.
    with gone as (
        delete from mailboat.inbox_holders h
        where h.ctid = any (array(
            select o.ctid from mailboat.inbox_holders o
            where o.consumer = inbox_claim.consumer
              and (o.instance <> inbox_claim.instance and o.until < clock_timestamp()
                   or o.instance = inbox_claim.instance and o.life < inbox_claim.life)
            order by o.instance, o.life
            for update))
        returning h.running
    )
    insert into mailboat.inbox_attempts as a (consumer, event_id, attempts, deaths)
    select inbox_claim.consumer, e.id, count(*), count(*)
    from gone, unnest(gone.running) e(id)
    where not exists (select from mailboat.handled d where d.consumer = inbox_claim.consumer and d.event_id = e.id)
    group by e.id
    on conflict on constraint inbox_attempts_pkey do update
    set attempts = a.attempts + excluded.attempts, deaths = a.deaths + excluded.deaths, changed_at = clock_timestamp()
    where not a.dead;

    update mailboat.inbox_attempts a
    set attempts = 0, deaths = 0, dead = false, due_at = null, changed_at = clock_timestamp()
    where a.consumer = inbox_claim.consumer and a.event_id = any (inbox_claim.replays) and a.dead;

    return query
    with answered as materialized (
        select q.id, q.ordinal, coalesce(a.attempts, 0) + 1 as attempt, coalesce(a.deaths, 0) as deaths,
               case when d.event_id is not null then 'done'
                    when a.dead then 'dead'
                    when a.due_at > clock_timestamp() or o.until is not null then 'wait'
                    else 'claimed' end as state,
               extract(epoch from greatest(a.due_at, o.until) - clock_timestamp())::float8 as wait
        from unnest(inbox_claim.event_ids) with ordinality q(id, ordinal)
        left join mailboat.handled d on d.consumer = inbox_claim.consumer and d.event_id = q.id
        left join mailboat.inbox_attempts a on a.consumer = inbox_claim.consumer and a.event_id = q.id
        left join lateral (
            select max(h.until) as until from mailboat.inbox_holders h
            where h.consumer = inbox_claim.consumer and h.instance <> inbox_claim.instance
              and h.until > clock_timestamp() and q.id = any (h.running)
        ) o on true
    ), noted as (
        insert into mailboat.inbox_holders as h (consumer, instance, life, until, running)
        select inbox_claim.consumer, inbox_claim.instance, inbox_claim.life, clock_timestamp() + inbox_claim.lease,
               inbox_claim.running || array(select n.id from answered n where n.state = 'claimed')
        on conflict on constraint inbox_holders_pkey do update set until = excluded.until, running = excluded.running
    )
    select n.id, n.state, n.attempt, n.deaths, greatest(n.wait, 0) from answered n order by n.ordinal;
end
$$;

-- Keeps the events of a process its own. `running` is used if others took the process for dead in the meantime.
create function mailboat.inbox_renew(consumer text, instance text, life text, lease interval, running uuid[]) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    insert into mailboat.inbox_holders as h (consumer, instance, life, until, running)
    values (inbox_renew.consumer, inbox_renew.instance, inbox_renew.life, clock_timestamp() + lease, inbox_renew.running)
    on conflict on constraint inbox_holders_pkey do update set until = excluded.until;
end
$$;

-- Events that were not handled: how many attempts count by now, and when the next one may begin. Attempts never go down.
create function mailboat.inbox_fail(
    consumer text, instance text, life text, event_ids uuid[], attempts integer[], deaths integer[],
    retry_in double precision[], dead boolean
) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform mailboat.check_consumer(inbox_fail.consumer, '');
    insert into mailboat.inbox_attempts as a (consumer, event_id, attempts, deaths, due_at, dead)
    select inbox_fail.consumer, e.id, e.attempts, e.deaths, clock_timestamp() + make_interval(secs => e.retry_in), inbox_fail.dead
    from unnest(inbox_fail.event_ids, inbox_fail.attempts, inbox_fail.deaths, inbox_fail.retry_in) e(id, attempts, deaths, retry_in)
    where e.attempts > 0 or e.retry_in > 0 or inbox_fail.dead
    order by e.id
    on conflict on constraint inbox_attempts_pkey do update
    set attempts = greatest(a.attempts, excluded.attempts), deaths = greatest(a.deaths, excluded.deaths),
        due_at = excluded.due_at, dead = a.dead or excluded.dead, changed_at = clock_timestamp();
    update mailboat.inbox_holders h
    set running = array(select r from unnest(h.running) r where r <> all (inbox_fail.event_ids))
    where h.consumer = inbox_fail.consumer and h.instance = inbox_fail.instance and h.life = inbox_fail.life;
end
$$;

-- Events that were handled after a failure: their attempts are of no interest any more.
create function mailboat.inbox_done(consumer text, event_ids uuid[]) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.inbox_attempts a
    where a.consumer = inbox_done.consumer and a.event_id = any (inbox_done.event_ids) and not a.dead;
end
$$;

-- A process that stops in good order.
create function mailboat.inbox_leave(consumer text, instance text, life text) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.inbox_holders h
    where h.consumer = inbox_leave.consumer and h.instance = inbox_leave.instance and h.life = inbox_leave.life;
end
$$;

-- ---- what consumers need beside events ------------------------------------------------------------------------------

-- A heartbeat of one consumer process. While `idle_for` lasts, writers notify: LISTEN mailboat; the payload is the outbox.
create function mailboat.beat(subscription text, instance text, idle_for interval default '0', outbox text default null)
    returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
begin
    insert into mailboat.consumers as c (subscription_id, instance, outbox, beat_at, idle_until)
    values (s.id, beat.instance, s.outbox, clock_timestamp(), clock_timestamp() + least(idle_for, interval '5 minutes'))
    on conflict on constraint consumers_pkey do update
    set beat_at = excluded.beat_at, idle_until = excluded.idle_until, outbox = excluded.outbox;
    delete from mailboat.consumers c where c.subscription_id = s.id and c.beat_at < clock_timestamp() - interval '1 hour';
end
$$;

-- A consumer process that stops in good order.
create function mailboat.leave(subscription text, instance text, outbox text default null) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
begin
    delete from mailboat.consumers c where c.subscription_id = s.id and c.instance = leave.instance;
end
$$;

-- Makes time partitions ahead where no relay does; returns how many were made.
create function mailboat.tend(subscription text, outbox text default null) returns integer
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
begin
    delete from mailboat.refusals r where r.subscription_id = s.id and r.last_at < clock_timestamp() - interval '30 days';
    if (select relkind from pg_class where oid = to_regclass(s.outbox)) = 'p' then
        return mailboat.ensure_partitions(s.outbox);
    end if;
    return 0;
end
$$;

-- What a consumer kit reads at its start instead of a manifest.
create function mailboat.consumer_settings(subscription text, outbox text default null) returns jsonb
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
    p mailboat.pull_policies := mailboat.pull_policy(s);
begin
    return jsonb_build_object(
        'outbox', s.outbox, 'state', s.state, 'partitions', s.partitions, 'batchSize', p.batch_size, 'groupBy', p.group_by,
        'maxAttempts', p.max_attempts, 'noHandler', p.no_handler,
        'isOwner', pg_has_role(mailboat.caller(), (select nspowner from pg_namespace where nspname = 'mailboat'), 'usage'));
end
$$;

-- How far a pull subscription is behind: matching events that no cursor has passed (counted up to `most`), the age of the
-- oldest in seconds, parked events and dead letters that were not replayed.
create function mailboat.pull_lag(
    subscription text, most integer default 10000, outbox text default null,
    out pending bigint, out bounded boolean, out oldest double precision, out parked bigint, out dead bigint
)
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
    p mailboat.pull_policies := mailboat.pull_policy(s);
begin
    execute format($lag$
        with mine as materialized (
            select m.partition, m.done, m.upto, m.position, m.debts from mailboat.cursors m where m.subscription_id = $1
        ), edge as materialized (
            select min(pg_snapshot_xmax(done)::text::numeric)::text::xid8 as xmax from mine
        ), found as (
            select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %1$s as e
            where e.xid = any (array(select distinct pg_snapshot_xip(done) from mine)) and e.xid < (select xmax from edge)
            union all
            select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %1$s as e
            where e.xid >= (select xmax from edge)
            limit $2
        ), looked_at as (
            select e.created_at,
                   mine.partition is not null and not pg_visible_in_snapshot(e.xid, mine.done)
                   and not coalesce(pg_visible_in_snapshot(e.xid, mine.upto) and e.id <= mine.position, false)
                   and not coalesce(mailboat.settled_before(mine.debts, e.slot, e.xid, e.id), false)
                   and %3$s as waits
            from found as e left join mine on mine.partition = e.slot %% %2$s
            offset 0
        )
        select count(*) filter (where waits), count(*) >= $2,
               extract(epoch from clock_timestamp() - min(created_at) filter (where waits))::float8
        from looked_at$lag$, mailboat.pull_rows(s.outbox, p.columns), s.partitions, mailboat.pull_wanted(s, p))
    using s.id, most
    into pending, bounded, oldest;
    select count(*) into parked from mailboat.parked m where m.subscription_id = s.id;
    select count(*) into dead from mailboat.dead_letters m where m.subscription_id = s.id and m.replayed_at is null;
end
$$;

-- ---- rights ----------------------------------------------------------------------------------------------------------

do $$
begin
    if not exists (select from pg_roles where rolname = 'mailboat_consumer') then
        create role mailboat_consumer nologin;
    end if;
exception
    when duplicate_object or unique_violation then null;
    when insufficient_privilege then null;
end
$$;

-- Nobody but the owner calls what the functions above are made of. (Whoever makes journals changes nothing else.)
do $$
declare
    internal regprocedure;
begin
    for internal in
        select p.oid from pg_proc p
        where p.pronamespace = 'mailboat'::regnamespace
          and p.proname in ('grant_consumer', 'revoke_consumer', 'outbox_of', 'drop_journals', 'read_stretch', 'window_bounds',
                            'uncut', 'park_event', 'line_up', 'emit_dead', 'give_up', 'journal_entry', 'note_begin', 'lock_cursor', 'save_cursor',
                            'fresh_partitions', 'take_parked', 'take_window', 'pull', 'once', 'forget', 'prune_handled', 'beat',
                            'leave', 'tend', 'consumer_settings', 'pull_lag', 'inbox_claim', 'inbox_renew', 'inbox_fail', 'inbox_done',
                            'inbox_leave')
           or p.oid = 'mailboat.refuse(text, uuid, text, text, boolean, interval, boolean, text)'::regprocedure
    loop
        execute format('revoke execute on function %s from public', internal);
    end loop;
end
$$;

-- Grants mailboat_consumer, where it exists, what consumers call. Each of these functions checks who may consume what.
create function mailboat.grant_consumer_role() returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    role text;
begin
    for role in select 'mailboat_consumer' union select 'mailboat_relay' union select o.relay from mailboat.outboxes o loop
        if to_regrole(quote_ident(role)) is not null then
            execute format('grant usage on schema mailboat to %I', role);
            execute format(
                'grant execute on function mailboat.pull(text, integer, text),'
                ' mailboat.refuse(text, uuid, text, text, boolean, interval, boolean, text), mailboat.once(text, uuid),'
                ' mailboat.forget(text, uuid), mailboat.prune_handled(text, interval, integer), mailboat.beat(text, text, interval, text),'
                ' mailboat.leave(text, text, text), mailboat.tend(text, text), mailboat.consumer_settings(text, text),'
                ' mailboat.pull_lag(text, integer, text),'
                ' mailboat.inbox_claim(text, text, text, interval, uuid[], uuid[], uuid[]),'
                ' mailboat.inbox_renew(text, text, text, interval, uuid[]),'
                ' mailboat.inbox_fail(text, text, text, uuid[], integer[], integer[], double precision[], boolean),'
                ' mailboat.inbox_done(text, uuid[]), mailboat.inbox_leave(text, text, text) to %I', role);
        end if;
    end loop;
end
$$;

revoke execute on function mailboat.grant_consumer_role() from public;
