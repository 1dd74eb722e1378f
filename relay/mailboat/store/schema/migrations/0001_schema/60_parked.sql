-- Events of pull subscriptions that failed: parked, retried, given up.

-- Seconds until the next attempt, by the same formula as in relays.
create function mailboat.pull_backoff(p mailboat.pull_policies, failures integer) returns double precision
    language sql volatile
    set search_path = pg_catalog, pg_temp
    return least(p.backoff_initial * p.backoff_factor ^ least(greatest(failures, 1) - 1, 64), p.backoff_max)
           * (1 + p.backoff_jitter * (2 * random() - 1));

-- Park one event. `due`: time of the next attempt; null: the event waits behind the head of its key.
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

-- Whether a parked event waits behind another one of its key. Order of a key's queue: replayed events first, by position, then
-- the others in the order of parking. Members of the event's own group do not count.
create function mailboat.waits_behind(p mailboat.parked) returns boolean
    language sql stable
    set search_path = pg_catalog, pg_temp
    return p.key is not null and exists (
        select from mailboat.parked q
        where q.subscription_id = p.subscription_id and q.partition = p.partition and q.key = p.key
          and mailboat.key_slot(q.key, 0) = mailboat.key_slot(p.key, 0)
          and coalesce(q.unit <> p.unit, true)
          and (q.rank, case when q.rank = 0 then q.id else 0 end, q.ordinal) < (p.rank, case when p.rank = 0 then p.id else 0 end, p.ordinal));

-- Make the head of each of these keys due, if it has no time because it waited behind an event that is gone.
create function mailboat.schedule_heads(subscription bigint, of_partition integer, keys text[]) returns void
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

-- A JSON payload exactly as written; null if the payload is not JSON.
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

-- A dead letter as one document. A JSON payload is embedded as written, any other is encoded as base64. A payload of more than
-- 512 KiB is left out, so that the document fits into an event and a message; the table keeps it.
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

-- Emit dead letters as events, in the transaction that gives up on them, so that another subscription delivers them to a topic.
-- They keep the key of the event. A dead letter of such an event is not emitted, for any subscription.
create function mailboat.emit_dead_letters(s mailboat.subscriptions, dead_ids bigint[]) returns void
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

-- Turn parked events into dead letters and schedule the next events of their keys, or block them, depending on onExhausted.
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
    if p.block_when_exhausted then
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
    if p.emit_dead_letters then
        perform mailboat.emit_dead_letters(s, letters);
    end if;
    perform mailboat.schedule_heads(s.id, of_partition, keys);
    return 'DeadLettered';
end
$$;

-- Refuse an event that could not be handled. To be called after the rollback of the transaction that pulled it, in a separate
-- transaction. Counts the attempt and parks the event, with later events of its key behind it. If attempts are used up, or
-- `final` is true, the event becomes a dead letter. `retry_in` overrides the back-off. `counted => false` returns the event
-- without counting an attempt.
-- Returns Parked, DeadLettered, Blocked, or Noted (the next pull of its partition parks the event).
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
