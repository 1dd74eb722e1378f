-- Consumers without a broker: `sink: {pull: {}}`. Applications read events with mailboat.pull, in the transaction of their
-- effects (docs/consumers.md).
--
-- The lock on a cursor's row is the ownership of its partition, and always ends with the consumer's transaction. Effects and
-- progress commit together, so there is no lease, no acknowledgement and no inbox. The functions run with the rights of the
-- schema's owner, check the rights of the caller (mailboat.consumer_grants), and qualify every name.

-- The result of mailboat.pull.
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
    attempt         integer,                            -- from 1
    redeliveries    integer,                            -- earlier pulls of this batch that did not commit
    replay          boolean,                            -- a replayed dead letter
    group_label     text                                -- by delivery.groupBy; null: none
);

-- Return the subscription, or raise if the caller may not consume it.
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

-- Return the policy of a subscription. Reading a table may run functions of that table's owner (of the types of its columns, of
-- its row security). Consumers read with the rights of the schema's owner, so they read only a table of that owner. The lock
-- keeps the table.
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

-- Lock and return the cursor of a partition. If another consumer has locked it, or a live relay owns it, return null.
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
            return null;                                -- another consumer moved the cursor since this transaction's snapshot
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
                  hint = 'If this copy is the one to continue with, run: mailboat rebase -f <manifests>.';
    end if;
    return c;
end
$$;

-- The timeline of the server. A cursor that has not moved since a failover blocks retention.
create function mailboat.timeline() returns integer
    language sql volatile
    return ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer;

create function mailboat.save_cursor(c mailboat.cursors) returns void
    language sql
    set search_path = pg_catalog, pg_temp
    begin atomic
        update mailboat.cursors m
        set settled_snapshot = (c).settled_snapshot, window_snapshot = (c).window_snapshot, lowest = (c).lowest,
            highest = (c).highest, "position" = (c).position, highest_settled_id = (c).highest_settled_id, sequence = (c).sequence,
            previous_layout = (c).previous_layout, suspect_until = (c).suspect_until, crash_count = 0, owner = null, epoch = null,
            released = true, timeline = mailboat.timeline()
        where m.subscription_id = (c).subscription_id and m.partition = (c).partition;
    end;

-- Return the partitions with a closed cursor that have matching events, or may have: one read for all partitions. If none has any
-- and `moves` is true, advance the cursors past events of other subscriptions, so that the next read is short.
create function mailboat.fresh_partitions(s mailboat.subscriptions, p mailboat.pull_policies, moves boolean) returns integer[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    most    constant bigint := 500;
    scanned bigint;
    hits    integer[];
    closed  integer[];
    settled_snapshots   text[];
    head     pg_snapshot;
    late    boolean;
    seen_late boolean;
begin
    select array_agg(m.partition), bool_or(exists (select pg_snapshot_xip(m.settled_snapshot))) into closed, late
    from mailboat.cursors m
    where m.subscription_id = s.id and m.window_snapshot is null;
    if closed is null then
        return '{}';
    end if;
    execute format('select * from mailboat.probe_%s($1, $2, $3)', s.id)
    using s.id, s.partitions, most
    into scanned, head, hits, closed, settled_snapshots, seen_late;
    if scanned > most then
        return array(select unnest(closed) order by random());
    end if;
    -- If a cursor moved since the first query, it may have late events that this read left out.
    if scanned > 0 and moves and cardinality(hits) = 0 and (late or not seen_late) then
        begin
            update mailboat.cursors m
            set settled_snapshot = head, timeline = mailboat.timeline()
            from (select n.subscription_id, n.partition
                  from mailboat.cursors n join unnest(closed, settled_snapshots) seen(partition, settled_snapshot)
                    on n.partition = seen.partition and n.settled_snapshot::text = seen.settled_snapshot
                  where n.subscription_id = s.id and n.window_snapshot is null
                  for no key update of n skip locked) idle
            where m.subscription_id = idle.subscription_id and m.partition = idle.partition;
        exception when serialization_failure then
            null;
        end;
    end if;
    return hits;
end
$$;

-- Return due parked events of one key or one group. They are deleted with the consumer's commit. Null: an event was given up, and
-- the caller should commit that before another attempt.
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
        -- If the head was never tried, return it with the events behind it, up to the first one that was tried.
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
        set attempts = head.attempts + died, reason = 'ConsumerDied', last_error = mailboat.crash_message(died),
            first_failed_at = coalesce(first_failed_at, clock_timestamp()), last_failed_at = clock_timestamp()
        where m.subscription_id = s.id and m.ordinal = any (members);
        perform mailboat.give_up(s, p, c.partition, members);
        return null;
    end if;
    perform mailboat.record_attempt(journal, state, died);
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
    perform mailboat.schedule_heads(s.id, c.partition, keys);
    return taken;
end
$$;

create function mailboat.crash_message(times integer) returns text
    language sql immutable
    return format('consumers died, or rolled back without mailboat.refuse, %s times with this event in hand', times);

-- Return the next events of the cursor's window. The cursor moves with the consumer's commit. Events behind a parked one of their
-- key are parked too, and so are events that were refused. Null: as in take_parked.
create function mailboat.take_window(
    s mailboat.subscriptions, p mailboat.pull_policies, c mailboat.cursors, most integer
) returns mailboat.pulled[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    journal   constant text := mailboat.journal_name(s.id, c.partition, 'window');
    state     constant text := concat_ws('|', s.generation, c.settled_snapshot, c.position);
    chunk   mailboat.window_chunk;
    reading   integer;
    cut       integer;
    passed    integer;
    last      integer;
    next      integer;
    ends      integer[];
    handed    integer := 0;                             -- number of events to return
    taken     integer[] := '{}';                        -- their places in the batch, unless all are returned
    ids       uuid[];                                   -- of the batch, by place; so are the keys
    keys      text[];
    refused   uuid[];                                   -- events of the batch that a consumer refused
    held      text[];                                   -- keys of the batch with a parked event
    aside     boolean;
    noted     mailboat.refusals;
    singles   boolean;
    died      integer;
    begun     integer;                                  -- attempts with one event or group
    in_batch  integer := 0;                             -- attempts with the whole batch
    lately    boolean;
    returned  integer := 0;
    ordinals  bigint[];
    waits     boolean;
    parks     boolean;
    gives_up  boolean;
    dead_lettered    boolean := false;
begin
    for round in 1 .. 20 loop
        reading := most;
        loop
            chunk := mailboat.read_chunk(s, p, c, reading);
            if chunk.batch is null and chunk.highest is not null then
                c."position" := case when c.window_snapshot is null then 0 else c.position end;
                c.window_snapshot := chunk.window_snapshot;
                c.lowest := chunk.lowest;
                c.highest := chunk.highest;
                continue;
            end if;
            if chunk.batch is null then               -- the window is empty
                chunk.batch := '{}';
                chunk.complete := true;
                chunk.more := false;
            end if;
            cut := case when p.group_by = '{}' then least(most, cardinality(chunk.batch))
                        else mailboat.whole_groups(s, p, c, chunk, most) end;
            exit when cut is not null and cut <= greatest(most, p.max_group);
            if cut is not null or reading >= p.max_group then
                raise exception 'a group of subscription % has more than % events', s.name, p.max_group
                    using errcode = 'program_limit_exceeded',
                          detail = format('It begins with event %s.', (chunk.batch[1]).event_id),
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
                             from unnest(chunk.batch) v
                             where p.ordered and v.key is not null and v.position <= (chunk.batch[cut]).position
                               and exists (select from mailboat.parked m
                                           where m.subscription_id = s.id and m.partition = c.partition
                                             and mailboat.key_slot(m.key, 0) = v.slot and m.key = v.key))
                into ids, keys, held
                from unnest(chunk.batch) with ordinality
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
            singles := begun > 0 or coalesce((chunk.batch[1]).position <= c.suspect_until, false) or in_batch > returned;
            if round = 1 and greatest(begun, in_batch) > returned and lately then
                return '{}';
            end if;

            if not aside and not singles then
                handed := cut;
            else
                if ids is null then
                    ids := array(select u.event_id from unnest(chunk.batch) u limit cut);
                    keys := array(select u.key from unnest(chunk.batch) u limit cut);
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
                          from unnest(chunk.batch) with ordinality
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
                        noted.error := mailboat.crash_message(died + 1);
                        gives_up := true;
                        dead_lettered := true;
                    end if;
                    if noted.failures > 0 or noted.due_at is not null or noted.final or waits then
                        ordinals := array(
                            select mailboat.park_event(
                                s, c, u.e, c.sequence + u.place, case when last > next then (chunk.batch[next]).position end,
                                coalesce(noted.failures, 0),
                                case when noted.reason is null and noted.due_at is null
                                     then case when (u.e).key is null or not p.ordered then clock_timestamp() end
                                     when u.place = next then coalesce(noted.due_at, clock_timestamp()) end,
                                noted.reason, noted.error)
                            from (select row(b."position", b.event_id, b.event_type, b.aggregate_type, b.aggregate_id, b.key,
                                             b.payload, b.content_type, b.headers, b.tags, b.traceparent, b.created_at, b.slot,
                                             b.xid, b.group_label)::mailboat.candidate as e, b.place + next - 1 as place
                                  from unnest(chunk.batch[next:last]) with ordinality
                                       b("position", event_id, event_type, aggregate_type, aggregate_id, key, payload,
                                         content_type, headers, tags, traceparent, created_at, slot, xid, group_label, place)
                                  order by b.place) u);
                        parks := true;
                        if gives_up then
                            perform mailboat.give_up(s, p, c.partition, ordinals);
                        end if;
                        if p.ordered and (not coalesce(gives_up, false) or p.block_when_exhausted) then
                            held := held || array_remove(keys[next:last], null);
                        end if;
                    else
                        taken := taken || array(select generate_series(next, last));
                        handed := cardinality(taken);
                    end if;
                    passed := last;
                    next := last + 1;
                    exit when dead_lettered or singles and handed > 0;
                end loop;
                if parks and cardinality(held) > 0 then
                    perform mailboat.schedule_heads(s.id, c.partition, held);
                end if;
                c.suspect_until := case when singles then greatest(c.suspect_until, (chunk.batch[cut]).position) end;
                c.suspect_until := case when c.suspect_until > (chunk.batch[passed]).position then c.suspect_until end;
            end if;
            c.sequence := c.sequence + passed;
            c.highest_settled_id := greatest(c.highest_settled_id, (chunk.batch[passed]).position);
        end if;

        if passed < cardinality(chunk.batch) or chunk.more then
            c.window_snapshot := chunk.window_snapshot;
            c.lowest := chunk.lowest;
            c.highest := chunk.highest;
            c."position" := case when passed = 0 then c.position else (chunk.batch[passed]).position end;
        elsif chunk.complete then
            c.settled_snapshot := chunk.window_snapshot;
            c.window_snapshot := null;
            c.lowest := null;
            c.highest := null;
            c.previous_layout := null;
            c."position" := 0;
        else
            c."position" := chunk.reach;
        end if;
        exit when dead_lettered or handed > 0 or c.window_snapshot is null;
    end loop;

    perform mailboat.save_cursor(c);
    if dead_lettered then
        return null;
    end if;
    if handed = 0 then
        return '{}';
    end if;
    perform mailboat.record_attempt(journal, state || case when singles then '|single' else '|batch' end,
                                case when singles then begun else in_batch end);
    return array(
        select row(u."position", u.event_id, u.event_type, u.aggregate_type, u.aggregate_id, u.key, u.payload, u.content_type,
                   u.headers, u.tags, u.traceparent, u.created_at, c.partition, died + 1, greatest(begun, in_batch), false,
                   u.group_label)::mailboat.pulled
        from unnest(chunk.batch) with ordinality
             u("position", event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
               traceparent, created_at, slot, xid, group_label, place)
        where case when handed = passed then u.place <= passed else u.place = any (taken) end
        order by u.place);
end
$$;

-- Return the next events of one free partition, for the caller's transaction: their effects and the progress commit together, or
-- not at all. If the subscription is paused, all partitions are locked, or there are no new events, the result is empty. The
-- caller should then commit as well, and call again later (LISTEN mailboat shortens the wait, see mailboat.heartbeat).
create function mailboat.pull(subscription text, max_events integer default null, outbox text default null)
    returns setof mailboat.pulled
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off                         -- a bitmap is built completely before a limit can end the scan
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
    -- Choose at random between partitions with an open window or due parked events, and those with new events, so that a large
    -- backlog of one partition does not delay the others.
    ready := array(
        select m.partition from mailboat.cursors m
        where m.subscription_id = s.id
          and (m.window_snapshot is not null
               or exists (select from mailboat.parked d
                          where d.subscription_id = s.id and d.partition = m.partition and d.next_attempt_at <= clock_timestamp()))
        order by random());
    fresh := random() >= cardinality(ready)::double precision / s.partitions;
    for turn in 1 .. 2 loop
        listed := case when fresh then mailboat.fresh_partitions(s, p, moves => cardinality(ready) = 0) else ready end;
        foreach chosen in array coalesce(listed, '{}') loop
            c := mailboat.lock_cursor(s.id, chosen);
            continue when c.partition is null;
            -- The lock keeps the subscription from being repartitioned or retired, so the row that is read now matches the
            -- cursor.
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
