-- Subscriptions and relays of an outbox, from the database alone (`mailboat status`, `pause`, `forget`).

-- name: subscriptions
-- All subscriptions: the live owner of each partition, whether a live relay serves the subscription, and the last error of a
-- parked event with its age. A deleted subscription is listed as long as it has progress or dead letters.
select s.id, s.name, case when s.retired_at is null then s.state else 'Deleted' end, s.partitions, s.since_time::text, s.since_id, s.paused_reason,
       (select coalesce(jsonb_object_agg(c.partition, c.owner), '{}') from mailboat.cursors as c join mailboat.relays as r on r.id = c.owner
        where c.subscription_id = s.id and r.expires_at > clock_timestamp()),
       exists (select from mailboat.relays as r where s.id = any (r.serves) and r.expires_at > clock_timestamp()),
       p.last_error, extract(epoch from clock_timestamp() - p.last_failed_at)::float8,
       case when exists (select from mailboat.cursors as c where c.subscription_id = s.id)
            then to_char((s.retired_at + make_interval(secs => %(grace)s)) at time zone 'UTC', 'YYYY-MM-DD HH24:MI "UTC"') end
from mailboat.subscriptions as s
left join lateral (
    select p.last_error, p.last_failed_at from mailboat.parked as p
    where p.subscription_id = s.id and p.last_error is not null
    order by p.last_failed_at desc nulls last limit 1) as p on true
where s.outbox = %(outbox)s
  and (s.retired_at is null
       or exists (select from mailboat.cursors as c where c.subscription_id = s.id)
       or exists (select from mailboat.dead_letters as d where d.subscription_id = s.id))
order by s.name

-- name: addresses
-- Addresses of relays whose leases have not expired.
select distinct address from mailboat.relays
where outbox = %(outbox)s and expires_at > clock_timestamp() and address <> ''
order by address

-- name: serving
-- Live relays that serve a subscription.
select r.id
from mailboat.relays as r
join mailboat.subscriptions as s on s.id = any (r.serves)
where s.outbox = %(outbox)s and s.name = %(name)s and r.expires_at > clock_timestamp()
order by r.id
