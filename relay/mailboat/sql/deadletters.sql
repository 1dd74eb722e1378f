-- Dead letters, as a person looks at them and decides about them (`mailboat dlq`). `r` is the row in question and `s` its
-- subscription. Whatever changes parked events holds the cursor of their partition, and of no other one: a relay's settlement
-- holds it too, so the two take turns and never wait for each other.

-- name: matching
-- What a person asks for. Each condition counts only where it is given.
s.outbox = %(outbox)s
and (%(subscription)s::text is null or s.name = %(subscription)s or split_part(s.name, '/', 2) = %(subscription)s)
and (%(number)s::bigint is null or {number} = %(number)s)
and (%(event_id)s::text is null or r.event_id = %(event_id)s::text::uuid)
and (%(key)s::text is null or r.key = %(key)s)
and (%(type)s::text is null or r.event_type like %(type)s)
and (%(since)s::timestamptz is null or {time} >= %(since)s)
and (%(until)s::timestamptz is null or {time} < %(until)s)
and (%(error)s::text is null or position(lower(%(error)s) in lower(concat_ws(' ', r.reason, r.last_error))) > 0)

-- name: dead
-- Dead letters, the newest last.
select * from (
    select r.dead_id, s.name, r.partition, r.event_id::text, r.event_type, r.key, r.attempts, r.reason, r.last_error,
           r.died_at, r.replayed_at, octet_length(r.payload)
    from mailboat.dead_letters as r
    join mailboat.subscriptions as s on s.id = r.subscription_id
    where {matching} and (%(replayed)s or r.replayed_at is null)
    order by r.dead_id desc
    limit %(limit)s
) as newest
order by dead_id

-- name: dead_whole
-- Everything about them, payload and all.
select r.dead_id, s.name, r.partition, r.sequence, r.event_id::text, r.event_type, r.aggregate_type, r.aggregate_id, r.key,
       r.attempts, r.reason, r.last_error, r.first_failed_at, r.last_failed_at, r.died_at, r.replayed_at, r.created_at,
       r.content_type, r.headers::text, r.tags, r.traceparent, r.payload
from mailboat.dead_letters as r
join mailboat.subscriptions as s on s.id = r.subscription_id
where {matching}
order by r.dead_id
limit %(limit)s

-- name: candidates
-- Dead letters to replay, in the order of their partition; `waits`: the event is parked again already.
select r.dead_id, s.name, r.subscription_id, r.slot %% s.partitions, r.event_id::text, r.event_type, r.key, r.replayed_at,
       exists (select from mailboat.parked as p
               where p.subscription_id = r.subscription_id and p.event_id = r.event_id) as waits
from mailboat.dead_letters as r
join mailboat.subscriptions as s on s.id = r.subscription_id
where {matching} and (%(replayed)s or r.replayed_at is null)
order by r.sequence, r.dead_id
limit %(limit)s

-- name: hold_cursor
-- Nobody settles this partition until the transaction ends.
select partition from mailboat.cursors
where subscription_id = %(subscription_id)s and partition = %(partition)s
for no key update

-- name: replay
-- Puts dead letters at the head of their key's queue. What changed since they were looked at is left alone.
with taken as (
    update mailboat.dead_letters as d
    set replayed_at = clock_timestamp()
    from mailboat.subscriptions as s
    where s.id = d.subscription_id and d.dead_id = any (%(dead_ids)s) and d.subscription_id = %(subscription_id)s
      and d.slot %% s.partitions = %(partition)s
      and (d.replayed_at is null or %(again)s)
      and not exists (select from mailboat.parked as p
                      where p.subscription_id = d.subscription_id and p.event_id = d.event_id)
    returning d.*
)
insert into mailboat.parked (
    subscription_id, partition, rank, attempts, next_attempt_at, replay, sequence, reason, last_error, id, event_id, event_type,
    aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent, created_at, slot)
select subscription_id, %(partition)s, 0, 0, case when key is null or not %(ordered)s then clock_timestamp() end, true, sequence,
       reason, last_error, id, event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
       traceparent, created_at, slot
from taken
order by sequence, dead_id
returning ordinal, key

-- name: order_heads
-- One head per key: the first of its queue. It is due (a head that waits for its time goes on waiting), all others wait behind it.
update mailboat.parked as p
set next_attempt_at = case when p.ordinal = queue.head then clock_timestamp() end
from (
    select distinct on (key) key, ordinal as head
    from mailboat.parked
    where subscription_id = %(subscription_id)s and partition = %(partition)s and key = any (%(keys)s)
    order by key, rank, sequence, ordinal
) as queue
where p.subscription_id = %(subscription_id)s and p.partition = %(partition)s and p.key = queue.key
  and ((p.ordinal = queue.head and p.next_attempt_at is null and not p.blocked)
       or (p.ordinal <> queue.head and p.next_attempt_at is not null))

-- name: wake
-- Relays that sleep look at once.
select pg_notify('mailboat', %(outbox)s)

-- name: purge
-- Dead letters that were replayed long enough ago; some at a time.
delete from mailboat.dead_letters
where dead_id in (
    select r.dead_id
    from mailboat.dead_letters as r
    join mailboat.subscriptions as s on s.id = r.subscription_id
    where {matching} and r.replayed_at < clock_timestamp() - make_interval(secs => %(older_than)s::float8)
    limit %(limit)s)
