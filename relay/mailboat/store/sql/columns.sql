-- The rows of an outbox, and expressions on one of them, `found`. Statements that read events include them.

-- name: stored
-- The columns of an outbox under Mailboat's names. In a user-defined table, a column may be varchar, uuid or null. A slot is never
-- negative, so that its modulus gives the same partition in SQL and in Python.
{id} as "id",
{xid} as "xid",
{created_at} as "created_at",
{event_id} as "event_id",
{event_type}::text as "event_type",
{aggregate_type}::text as "aggregate_type",
{aggregate_id}::text as "aggregate_id",
{key}::text as "key",
coalesce({slot} & 2147483647, 0) as "slot",
{payload} as "payload",
coalesce({content_type}::text, 'application/json') as "content_type",
{headers} as "headers",
coalesce({tags}::text[], '{{}}') as "tags",
{traceparent}::text as "traceparent"

-- name: columns
-- The fields of an event, in types that need the least parsing.
found.id,
found.event_id::text,
found.event_type,
found.aggregate_type,
found.aggregate_id,
found.key,
found.payload,
found.content_type,
found.headers::text,
found.tags::text,
found.traceparent,
{created_at},
found.slot

-- name: too_large_columns
-- The same fields of a row that is too large for a relay: enough to refuse the event.
found.id,
found.event_id::text,
left(found.event_type, 255),
null::text,
null::text,
case when octet_length(found.key) <= 1024 then found.key end,
null::bytea,
left(found.content_type, 255),
to_json({marker} || %(bytes)s::text)::text,
'{{}}'::text,
null::text,
{created_at},
found.slot

-- name: created_at
-- RFC 3339. A time out of its range stays as Postgres prints it: the event is refused, and stored with that time.
case when found.created_at >= timestamptz '0001-01-01 00:00:00+00'
and found.created_at < timestamptz '10000-01-01 00:00:00+00'
then to_char(found.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
else found.created_at::text end

-- name: row_bytes
-- The size of a row in bytes when it is read. The length of a text or bytea is available without reading the value. Headers and
-- tags must be read: the length of their text does not follow from their size on disk.
(coalesce(octet_length(found.payload), 0)
+ coalesce(octet_length(found.headers::text), 0)
+ octet_length(found.tags::text)
+ octet_length(found.event_type)
+ coalesce(octet_length(found.aggregate_type), 0)
+ coalesce(octet_length(found.aggregate_id), 0)
+ coalesce(octet_length(found.key), 0)
+ octet_length(found.content_type)
+ coalesce(octet_length(found.traceparent), 0))
