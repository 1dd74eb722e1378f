-- Parked events, which are retried, and dead letters, which are not.

-- name: keys
-- The keys of one partition that have parked events. Later events of these keys must not overtake them.
select distinct key from mailboat.parked
where subscription_id = %(subscription)s and partition = %(partition)s and key is not null

-- name: count
select count(*) from mailboat.parked where subscription_id = %(subscription)s and partition = %(partition)s

-- name: queue_order
-- The order in which the parked events of a key are sent: replayed events first, by position, then the others in the order of
-- parking. Not by sequence number: a change of `partitions` restarts sequences at 1.
rank, case when rank = 0 then id end, ordinal

-- name: series
-- The series of a parked event: the partition and generation that its sequence number counts in.
coalesce(series_partition, partition),
coalesce(series_generation, (select s.generation from mailboat.subscriptions as s where s.id = subscription_id))

-- name: due
-- Heads that are due, the oldest first. At least one row, then up to a number of rows and bytes for which the relay has room.
select {columns}, ordinal, sequence, {series}, attempts, replay, suspect, blocked, pending_dead_letter,
       reason, last_error, first_failed_at::text
from (
    select found.*, row_number() over in_order as place, sum({row_bytes}) over in_order as bytes_so_far
    from (
        select *
        from mailboat.parked
        where subscription_id = %(subscription)s and partition = %(partition)s and next_attempt_at <= clock_timestamp()
        order by next_attempt_at, ordinal
        limit %(limit)s
    ) as found
    window in_order as (order by next_attempt_at, ordinal rows unbounded preceding)
) as found
where place = 1 or bytes_so_far <= %(max_bytes)s
order by next_attempt_at, ordinal

-- name: next_due
-- Seconds until the next head is due.
select extract(epoch from min(next_attempt_at) - clock_timestamp())::float8
from mailboat.parked
where subscription_id = %(subscription)s and partition = %(partition)s and next_attempt_at is not null

-- name: queue
-- The parked events of a key in the order of sending, within the same limits as `due`.
select {columns}, ordinal, sequence, {series}, attempts, replay, suspect, blocked, pending_dead_letter,
       reason, last_error, first_failed_at::text
from (
    select found.*, row_number() over in_order as place, sum({row_bytes}) over in_order as bytes_so_far
    from (
        select *
        from mailboat.parked
        where subscription_id = %(subscription)s and partition = %(partition)s and key = %(key)s
          and mailboat.key_slot(key, 0) = mailboat.key_slot(%(key)s::text, 0)  -- by index parked_queue
        order by {queue_order}
        limit %(limit)s
    ) as found
    window in_order as (order by {queue_order} rows unbounded preceding)
) as found
where place = 1 or bytes_so_far <= %(max_bytes)s
order by {queue_order}

-- name: park
-- Park an event, with its payload.
insert into mailboat.parked (
    subscription_id, partition, attempts, next_attempt_at, blocked, suspect, pending_dead_letter, sequence, series_partition,
    series_generation, first_failed_at, last_failed_at, reason, last_error, id, event_id, event_type, aggregate_type,
    aggregate_id, key, payload, content_type, headers, tags, traceparent, created_at, slot)
values (
    %(subscription)s, %(partition)s, %(attempts)s,
    clock_timestamp() + make_interval(secs => %(retry_in)s::float8), %(blocked)s, %(suspect)s, %(pending_dead_letter)s,
    %(sequence)s, %(partition)s, (select generation from mailboat.subscriptions where id = %(subscription)s),
    case when %(reason)s::text is not null then clock_timestamp() end,
    case when %(reason)s::text is not null then clock_timestamp() end,
    %(reason)s, %(error)s, %(id)s, %(event_id)s, %(type)s, %(aggregate_type)s, %(aggregate_id)s, %(key)s, %(payload)s,
    %(content_type)s, mailboat.headers_to_jsonb(%(headers)s::text), %(tags)s::text::text[], %(traceparent)s,
    %(created_at)s::timestamptz, %(slot)s)

-- name: repark
-- Record another failure of a parked event.
update mailboat.parked
set attempts = greatest(attempts, %(attempts)s),
    next_attempt_at = clock_timestamp() + make_interval(secs => %(retry_in)s::float8),
    blocked = %(blocked)s,
    pending_dead_letter = %(pending_dead_letter)s,
    first_failed_at = coalesce(first_failed_at, clock_timestamp()),
    last_failed_at = clock_timestamp(),
    reason = coalesce(%(reason)s, reason),
    last_error = coalesce(%(error)s, last_error)
where subscription_id = %(subscription)s and ordinal = %(ordinal)s
returning key

-- name: unpark
-- Delete parked events that were delivered or became dead letters.
delete from mailboat.parked where subscription_id = %(subscription)s and ordinal = any (%(ordinals)s)
returning key

-- name: schedule_heads
-- Schedule the first event of each key, and no other one. A command may have replayed events before the former head, or dropped
-- the event that others waited behind. If the new head has no time, it is due at once. If the head has a time, that time stays. A
-- blocked head gets no time.
with head as materialized (
    select distinct on (key) key, ordinal
    from mailboat.parked
    where subscription_id = %(subscription)s and partition = %(partition)s and key = any (%(keys)s)
      and mailboat.key_slot(key, 0) = any (array(select mailboat.key_slot(wanted, 0) from unnest(%(keys)s::text[]) as wanted))
    order by key, {queue_order}
)
update mailboat.parked as p
set next_attempt_at = case when p.ordinal = head.ordinal then clock_timestamp() end
from head
where p.subscription_id = %(subscription)s and p.partition = %(partition)s
  and p.key = head.key and mailboat.key_slot(p.key, 0) = mailboat.key_slot(head.key, 0)
  and case when p.ordinal = head.ordinal then p.next_attempt_at is null and not p.blocked else p.next_attempt_at is not null end

-- name: schedule_all
-- Schedule all events of a partition that no longer keeps order, because none of them waits behind another: each event without a
-- time is due at once.
update mailboat.parked
set next_attempt_at = clock_timestamp()
where subscription_id = %(subscription)s and partition = %(partition)s and next_attempt_at is null and not blocked

-- name: insert_dead_letter
-- Insert a dead letter with all that a replay needs.
insert into mailboat.dead_letters (
    subscription_id, partition, attempts, sequence, series_partition, series_generation, reason, last_error, first_failed_at,
    last_failed_at, id, event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
    traceparent, created_at, slot)
select
    %(subscription)s, %(partition)s, %(attempts)s, %(sequence)s, coalesce(p.series_partition, %(partition)s),
    coalesce(p.series_generation, s.generation), %(reason)s, %(error)s, coalesce(p.first_failed_at, clock_timestamp()),
    clock_timestamp(), %(id)s, %(event_id)s, %(type)s, %(aggregate_type)s, %(aggregate_id)s, %(key)s, %(payload)s,
    %(content_type)s, mailboat.headers_to_jsonb(%(headers)s::text), %(tags)s::text::text[], %(traceparent)s,
    %(created_at)s::timestamptz, %(slot)s
from mailboat.subscriptions as s
left join mailboat.parked as p on p.subscription_id = s.id and p.ordinal = %(ordinal)s
where s.id = %(subscription)s
