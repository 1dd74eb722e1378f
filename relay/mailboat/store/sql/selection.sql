-- Fragments shared by the commands on dead letters and parked events. `r` is the selected row and `s` its subscription. Every
-- transaction that changes parked events locks the cursor of their partition, and no other cursor. A settlement locks that cursor
-- too, so the two run one after the other and never deadlock.

-- name: matching
-- The filters of a command. A filter that is null matches every row.
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
-- Lock the cursor, so that no other transaction settles this partition until this one ends.
select partition from mailboat.cursors
where subscription_id = %(subscription)s and partition = %(partition)s
for no key update

-- name: wake
-- Notify idle relays, so that they poll at once.
select pg_notify('mailboat', %(outbox)s)
