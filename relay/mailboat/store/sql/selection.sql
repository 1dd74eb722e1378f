-- What people's commands on dead letters and parked events share. `r` is the row in question and `s` its subscription.
-- Whatever changes parked events holds the cursor of their partition, and of no other one: a relay's settlement holds it
-- too, so the two take turns and never wait for each other.

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

-- name: hold_cursor
-- Nobody settles this partition until the transaction ends.
select partition from mailboat.cursors
where subscription_id = %(subscription)s and partition = %(partition)s
for no key update

-- name: wake
-- Relays that sleep look at once.
select pg_notify('mailboat', %(outbox)s)
