-- Events that were set aside: parked ones, which will be tried again, and dead ones, which will not.

-- name: keys
-- The keys that nothing may pass, for one partition.
select distinct key from mailboat.parked
where subscription_id = %(subscription)s and partition = %(partition)s and key is not null

-- name: count
select count(*) from mailboat.parked where subscription_id = %(subscription)s and partition = %(partition)s

-- name: queue_order
-- The order in which a key's parked events must be sent: replayed ones first, in their old order, then as they were parked.
-- Not by sequence number: a change of `partitions` restarts those at 1.
rank, case when rank = 0 then id end, ordinal

-- name: series
-- Of an event that is parked. Its sequence is a number of this.
coalesce(series_partition, partition),
coalesce(series_generation, (select s.generation from mailboat.subscriptions as s where s.id = subscription_id))

-- name: due
-- Heads whose time has come, oldest first: at least one, then so many and so many bytes as a relay has room for.
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
-- Seconds until the next head's time.
select extract(epoch from min(next_attempt_at) - clock_timestamp())::float8
from mailboat.parked
where subscription_id = %(subscription)s and partition = %(partition)s and next_attempt_at is not null

-- name: queue
-- A key's parked events in the order of sending, as many at a time as above.
select {columns}, ordinal, sequence, {series}, attempts, replay, suspect, blocked, pending_dead_letter,
       reason, last_error, first_failed_at::text
from (
    select found.*, row_number() over in_order as place, sum({row_bytes}) over in_order as bytes_so_far
    from (
        select *
        from mailboat.parked
        where subscription_id = %(subscription)s and partition = %(partition)s and key = %(key)s
          and mailboat.key_slot(key, 0) = mailboat.key_slot(%(key)s::text, 0)  -- which there is an index on
        order by {queue_order}
        limit %(limit)s
    ) as found
    window in_order as (order by {queue_order} rows unbounded preceding)
) as found
where place = 1 or bytes_so_far <= %(max_bytes)s
order by {queue_order}

-- name: park
-- Sets events aside, whole.
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
-- Another failure of a parked event.
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

-- name: line_up
-- Of each of these keys the first has a time at which it is tried (due at once if it had none), and nobody else has: a
-- person may have replayed events before it, or dropped what it stood behind. A head that waits for its time goes on waiting.
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

-- name: set_loose
-- Where no order is kept any more nobody waits behind another: whoever had no time of its own is due at once.
update mailboat.parked
set next_attempt_at = clock_timestamp()
where subscription_id = %(subscription)s and partition = %(partition)s and next_attempt_at is null and not blocked

-- name: die
-- Gives up on an event, keeping all that is needed to replay it.
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
