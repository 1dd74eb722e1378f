-- Dead letters: list, show, replay and purge (`mailboat dlq`). `{matching}` is in selection.sql.

-- name: dead
-- List dead letters, the newest last.
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
-- Dead letters with all columns, named as the command prints them, the payload, and the document of mailboat.dead_letter_document. If `created_at` is out of the
-- range of Python's datetime, return null for it.
select r.dead_id, s.name as subscription, r.partition, r.sequence, r.event_id::text, r.event_type as type, r.aggregate_type,
       r.aggregate_id, r.key, r.attempts, r.reason, r.last_error, r.first_failed_at, r.last_failed_at, r.died_at, r.replayed_at,
       case when r.created_at between timestamptz '0001-01-02 00:00:00+00' and timestamptz '9999-12-30 00:00:00+00'
            then r.created_at end as created_at,
       r.content_type, r.headers::text, r.tags, r.traceparent, r.payload, mailboat.dead_letter_document(r)::text as document
from mailboat.dead_letters as r
join mailboat.subscriptions as s on s.id = r.subscription_id
where {matching}
order by r.dead_id
limit %(limit)s

-- name: candidates
-- Dead letters to replay, in the order of their positions. `waits`: the event is parked again already. `deleted`: the
-- subscription was deleted, so no relay would send the event.
select r.dead_id, s.name, r.subscription_id, r.slot %% s.partitions, r.event_id::text, r.event_type, r.key, r.replayed_at,
       exists (select from mailboat.parked as p
               where p.subscription_id = r.subscription_id and p.event_id = r.event_id) as waits,
       s.retired_at is not null as deleted
from mailboat.dead_letters as r
join mailboat.subscriptions as s on s.id = r.subscription_id
where {matching} and (%(replayed)s or r.replayed_at is null)
order by r.id, r.dead_id
limit %(limit)s

-- name: replay
-- Park dead letters at the head of their key's queue. A dead letter that changed since it was listed is skipped. So is one of a
-- deleted subscription: without a cursor, no relay would send it.
with taken as (
    update mailboat.dead_letters as d
    set replayed_at = clock_timestamp()
    from mailboat.subscriptions as s
    where s.id = d.subscription_id and d.dead_id = any (%(dead_ids)s) and d.subscription_id = %(subscription)s
      and d.slot %% s.partitions = %(partition)s
      and s.retired_at is null
      and exists (select from mailboat.cursors as c
                  where c.subscription_id = d.subscription_id and c.partition = %(partition)s)
      and (d.replayed_at is null or %(again)s)
      and not exists (select from mailboat.parked as p
                      where p.subscription_id = d.subscription_id and p.event_id = d.event_id)
    returning d.*
)
insert into mailboat.parked (
    subscription_id, partition, rank, attempts, next_attempt_at, replay, sequence, series_partition, series_generation,
    reason, last_error, id, event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
    traceparent, created_at, slot)
select subscription_id, %(partition)s, 0, 0, case when key is null or not %(ordered)s then clock_timestamp() end, true, sequence,
       series_partition, series_generation, reason, last_error, id, event_id, event_type, aggregate_type, aggregate_id, key,
       payload, content_type, headers, tags, traceparent, created_at, slot
from taken
order by id, dead_id
returning ordinal, key

-- name: purge
-- Delete dead letters that were replayed long enough ago, the oldest first, up to a limit.
delete from mailboat.dead_letters
where dead_id in (
    select r.dead_id
    from mailboat.dead_letters as r
    join mailboat.subscriptions as s on s.id = r.subscription_id
    where {matching} and r.replayed_at < clock_timestamp() - make_interval(secs => %(older_than)s::float8)
    order by r.dead_id
    limit %(limit)s)
