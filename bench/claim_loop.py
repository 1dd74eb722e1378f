"""The common way to serve an outbox: claim some rows with SKIP LOCKED, publish, wait, mark them, commit, and repeat.

The loop is correct and short, and gives the lower reference. Like the relay, the loop reads the same columns of the
same rows, builds the same messages and uses the same producer. Unlike the relay, the loop waits for the broker and for
a durable commit after each round. The rows per round determine its speed: each round costs one flush of the broker and
one of the database.
"""

from __future__ import annotations

import psycopg
from confluent_kafka import Producer
from measurement import Measured, Stopwatch
from pipe import encoded, send, warm_producer
from psycopg import sql

from mailboat.model import OutboxEvent
from mailboat.store.table import COLUMNS

_TABLE = "create table public.plain_outbox (like mailboat.outbox including defaults, published_at timestamptz)"
_INDEX = "create index on public.plain_outbox (id) where published_at is null"
_FILL = "insert into public.plain_outbox select e.*, null from mailboat.outbox as e order by e.id limit %s"
_CLAIM = sql.SQL(
    "select {columns} from public.plain_outbox as found where found.published_at is null"
    " order by found.id limit %s for update skip locked"
).format(columns=COLUMNS)
_MARK = "update public.plain_outbox set published_at = clock_timestamp() where id = any (%s)"


def claim_loop(url: str, bootstrap: str, topic: str, events: int, at_once: int) -> Measured:
    """Deliver a number of rows from a separate table."""
    producer = warm_producer(bootstrap, topic)
    with psycopg.connect(url) as connection:
        connection.execute("drop table if exists public.plain_outbox")
        connection.execute(_TABLE)
        connection.execute("alter table public.plain_outbox add primary key (id)")
        connection.execute(_INDEX)
        connection.execute(_FILL, (events,))
        connection.commit()
        watch = Stopwatch()
        done = 0
        while moved := _round(connection, producer, topic, done, at_once):
            done += moved
        return watch.stop(done)


def _round(connection: psycopg.Connection, producer: Producer, topic: str, done: int, at_once: int) -> int:
    with connection.transaction(), connection.cursor(binary=True) as cursor:
        rows = cursor.execute(_CLAIM, (at_once,)).fetchall()
        events = [OutboxEvent._make(row) for row in rows]
        send(producer, topic, [encoded(event, done + number) for number, event in enumerate(events, start=1)])
        producer.flush()
        cursor.execute(_MARK, ([event.id for event in events],))
    return len(events)
