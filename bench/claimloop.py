"""What many outboxes are served by: claim some rows with SKIP LOCKED, publish, wait, mark them, commit; and again.

Correct, short, and the yardstick from below. It has the same table columns to read, the same messages and the same
producer; it differs in paying a flush of the broker and a durable commit for every fifty events.
"""

from __future__ import annotations

import psycopg
from confluent_kafka import Producer
from measured import Measured, Stopwatch
from pipe import warm_producer
from stage import KEYS, PAYLOAD_BYTES

_AT_ONCE = 50
_TABLE = """
create table public.plain_outbox (
    id bigint generated always as identity primary key,
    event_id uuid not null default gen_random_uuid(),
    event_type text not null,
    key text not null,
    payload bytea not null,
    created_at timestamptz not null default now(),
    published_at timestamptz
)
"""
_FILL = """
insert into public.plain_outbox (event_type, key, payload)
select 'order.placed', 'order-' || n %% %(keys)s,
       convert_to(rpad('{"order":' || n || ',"note":"', %(bytes)s::integer - 2, 'x') || '"}', 'UTF8')
from generate_series(1, %(events)s::bigint) as n
"""
_CLAIM = """
select id, event_id::text, event_type, key, payload from public.plain_outbox
where published_at is null order by id limit %s for update skip locked
"""
_MARK = "update public.plain_outbox set published_at = clock_timestamp() where id = any (%s)"


def claim_loop(url: str, bootstrap: str, topic: str, events: int) -> Measured:
    """Deliver so many rows of a table of its own."""
    producer = warm_producer(bootstrap, topic)
    with psycopg.connect(url) as connection:
        connection.execute(_TABLE)
        connection.execute("create index on public.plain_outbox (id) where published_at is null")
        connection.execute(_FILL, {"keys": KEYS, "bytes": PAYLOAD_BYTES, "events": events})
        connection.commit()
        watch = Stopwatch()
        done = 0
        while moved := _round(connection, producer, topic):
            done += moved
        return watch.stop(done)


def _round(connection: psycopg.Connection, producer: Producer, topic: str) -> int:
    with connection.transaction(), connection.cursor(binary=True) as cursor:
        rows = cursor.execute(_CLAIM, (_AT_ONCE,)).fetchall()
        for _, event_id, event_type, key, payload in rows:
            producer.produce(topic, payload, key, headers=[("event_id", event_id), ("event_type", event_type)])
        producer.flush()
        cursor.execute(_MARK, ([row[0] for row in rows],))
    return len(rows)
