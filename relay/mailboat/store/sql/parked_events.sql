-- Parked events: list, show, retry and drop (`mailboat parked`). `{matching}` is in selection.sql, `{queue_order}` and `{series}`
-- are in parked_rows.sql.

-- name: parked
-- Parked events with their place in the queue of their key (1: the head) and the number of events behind them. If no order is
-- kept, no event waits behind another: each has its own `next_attempt_at`, and so all are listed.
select r.ordinal, s.name, r.subscription_id, r.partition, r.event_id::text, r.event_type, r.key, r.attempts,
       r.next_attempt_at, r.blocked, r.pending_dead_letter, r.replay, r.reason, r.last_error, r.parked_at, r.place, r.length - r.place
from (
    select p.*, row_number() over (queue order by {queue_order}) as place, count(*) over queue as length
    from mailboat.parked as p
    window queue as (partition by p.subscription_id, p.partition, p.key, case when p.key is null then p.ordinal end)
) as r
join mailboat.subscriptions as s on s.id = r.subscription_id
where {matching} and (r.place = 1 or r.next_attempt_at is not null or %(behind)s)
order by s.name, r.partition, r.key, r.place
limit %(limit)s

-- name: parked_whole
-- Parked events with all columns, named as the command prints them, and the payload. If `created_at` is out of the range of Python's datetime, return null for it.
select r.ordinal, s.name as subscription, r.partition, r.sequence, r.event_id::text, r.event_type as type, r.aggregate_type,
       r.aggregate_id, r.key, r.attempts, r.next_attempt_at, r.blocked, r.pending_dead_letter, r.replay, r.reason, r.last_error, r.first_failed_at,
       r.last_failed_at, r.parked_at,
       case when r.created_at between timestamptz '0001-01-02 00:00:00+00' and timestamptz '9999-12-30 00:00:00+00'
            then r.created_at end as created_at,
       r.content_type, r.headers::text, r.tags, r.traceparent, r.payload
from mailboat.parked as r
join mailboat.subscriptions as s on s.id = r.subscription_id
where {matching}
order by s.name, r.partition, r.key, r.rank, r.id, r.ordinal
limit %(limit)s

-- name: retry
-- Make the heads among these events due now. The attempts of a blocked event are used up, so its count restarts at 0.
with heads as (
    select distinct on (key, case when key is null or not %(ordered)s then ordinal end) ordinal, blocked
    from mailboat.parked
    where subscription_id = %(subscription)s and partition = %(partition)s
      and (key = any (%(keys)s) or ordinal = any (%(ordinals)s))
    order by key, case when key is null or not %(ordered)s then ordinal end, {queue_order}
)
update mailboat.parked as p
set next_attempt_at = clock_timestamp(),
    attempts = case when p.blocked then 0 else p.attempts end,
    blocked = false
from heads
where p.subscription_id = %(subscription)s and p.ordinal = heads.ordinal
returning p.ordinal, heads.blocked

-- name: drop
-- Drop parked events: they become dead letters.
with gone as (
    delete from mailboat.parked
    where subscription_id = %(subscription)s and partition = %(partition)s and ordinal = any (%(ordinals)s)
    returning *
)
insert into mailboat.dead_letters (
    subscription_id, partition, attempts, sequence, series_partition, series_generation, reason, last_error, first_failed_at,
    last_failed_at, id, event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
    traceparent, created_at, slot)
select subscription_id, partition, attempts, sequence, {series}, 'Dropped', coalesce(last_error, 'it was never tried'),
       coalesce(first_failed_at, clock_timestamp()), coalesce(last_failed_at, clock_timestamp()), id, event_id, event_type,
       aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent, created_at, slot
from gone
order by id, ordinal
returning dead_id, key
