-- Coverage by filters: events without a subscription, and subscriptions without an event. Bounded reads, no writes.

-- name: planner
-- Planner settings for the bounded reads. No bitmap scans: a bitmap is built completely before the first row is returned and a
-- limit can end the scan.
select set_config('jit', 'off', true), set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)

-- name: unmatched
-- Count, by type, the events of the last day among the newest ones (by the index on the position) that no subscription matches.
-- If the outbox has subscriptions that the caller did not name, their filters are unknown, and the result is empty.
select found.event_type, count(*)
from (
    select e.id, e.created_at, e.event_type, e.aggregate_type, e.tags from {rows} as e order by e.id desc limit %(newest)s
) as found
where found.created_at > clock_timestamp() - interval '1 day' and not {wanted}
  and not exists (select from mailboat.subscriptions as s
                  where s.outbox = %(outbox)s and s.retired_at is null and s.name <> all (%(names)s::text[]))
group by found.event_type
order by 2 desc, 1
limit %(types)s

-- name: idle
-- Subscriptions that settled no event of the last day, although they have passed the newest event, which is of that day. Only for
-- an outbox with time partitions: the settled rows of a plain table may be deleted.
with newest as materialized (
    select e.xid, e.created_at from {rows} as e order by e.id desc limit 1
)
select s.name
from mailboat.subscriptions as s
cross join newest
where s.outbox = %(outbox)s and s.name = any (%(names)s::text[]) and s.retired_at is null and s.state <> 'Paused'
  and newest.created_at > clock_timestamp() - interval '1 day'
  and (select c.relkind = 'p' from pg_class as c where c.oid = to_regclass(%(outbox)s))
  and not exists (select from mailboat.cursors as c
                  where c.subscription_id = s.id
                    and (c.window_snapshot is not null or not pg_visible_in_snapshot(newest.xid, c.settled_snapshot)))
  and not exists (select from mailboat.cursors as c join {rows} as e on e.id = c.highest_settled_id
                  where c.subscription_id = s.id and e.created_at > clock_timestamp() - interval '1 day')
order by s.name
