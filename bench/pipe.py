"""The upper bound: reading alone, producing alone, and both at once without any bookkeeping.

These read the same columns, build the same messages and use the same producer settings as the relay, by the code of the
relay. The difference to the relay is therefore the cost of its guarantees: windows, leases, outcomes, settlements. A
bare pipe loses events when it dies, repeats all of them when it starts again, and ignores the answers of the broker.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import psycopg
from confluent_kafka import Producer
from measurement import Measured, Stopwatch
from psycopg import sql

from mailboat.cloudevents import MessageEncoder
from mailboat.model import Message, OutboxEvent
from mailboat.sinks.kafka.librdkafka_settings import producer_settings
from mailboat.store.settings import ReadLimits
from mailboat.store.table import COLUMNS, TableLayout

_READ = sql.SQL(
    "select {columns} from (select e.* from {rows} as e where e.id > %s order by e.id limit %s) as found"
    " order by found.id"
).format(columns=COLUMNS, rows=TableLayout().rows)
_ENCODER = MessageEncoder("CloudEvents", source="mailboat/bench/orders", header_prefix="ce_")
_AT_ONCE = ReadLimits().rows
_READ_AHEAD = 2
_REPEATED = 20_000
"""Messages that are built in advance to measure producing alone, and sent repeatedly."""


def read_alone(url: str) -> Measured:
    """Read the whole outbox."""
    watch = Stopwatch()
    return watch.stop(sum(len(chunk) for chunk in _chunks(url)))


def produce_alone(url: str, bootstrap: str, topic: str, events: int) -> Measured:
    """Send a number of messages that are built in advance."""
    rows = islice((row for chunk in _chunks(url) for row in chunk), min(events, _REPEATED))
    messages = [encoded(row, number) for number, row in enumerate(rows, start=1)]
    producer = warm_producer(bootstrap, topic)
    watch = Stopwatch()
    sent = 0
    while sent < events:
        part = messages[: events - sent]
        send(producer, topic, part)
        sent += len(part)
    producer.flush()
    return watch.stop(events)


def bare_pipe(url: str, bootstrap: str, topic: str) -> Measured:
    """Read, encode and send the whole outbox. Reading and sending overlap."""
    producer = warm_producer(bootstrap, topic)
    chunks: queue.Queue[list[OutboxEvent] | None] = queue.Queue(maxsize=_READ_AHEAD)
    watch = Stopwatch()

    def read() -> None:
        try:
            for chunk in _chunks(url):
                chunks.put(chunk)
        finally:
            chunks.put(None)

    reader = threading.Thread(target=read, name="bench-reader")
    reader.start()
    sequence = 0
    while (chunk := chunks.get()) is not None:
        send(producer, topic, [encoded(event, sequence + n) for n, event in enumerate(chunk, start=1)])
        sequence += len(chunk)
    reader.join()
    producer.flush()
    return watch.stop(sequence)


def _chunks(url: str) -> Iterator[list[OutboxEvent]]:
    with psycopg.connect(url) as connection, connection.cursor(binary=True) as cursor:
        cursor.execute(
            "select set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)"
        )
        after = 0
        while rows := cursor.execute(_READ, (after, _AT_ONCE), prepare=True).fetchall():
            after = rows[-1][0]
            yield [OutboxEvent._make(row) for row in rows]


def encoded(event: OutboxEvent, sequence: int) -> Message:
    """Return the message that the relay would send."""
    return _ENCODER.encode(event, sequence=sequence, partition=0, generation=1, attempt=1)


def warm_producer(bootstrap: str, topic: str) -> Producer:
    """Return a connected producer with the settings of the relay."""
    producer = Producer(
        producer_settings({"bootstrap.servers": bootstrap, "log_level": 0}, max_message_bytes=1_000_000)
    )
    producer.list_topics(topic, timeout=10)  # excludes the connection from the measurement
    return producer


def send(producer: Any, topic: str, messages: list[Message]) -> None:
    """Produce the messages, and wait only for room in the buffer."""
    produce = producer.produce
    for message in messages:
        while True:
            try:
                produce(topic, message.value, message.key, headers=message.headers)
                break
            except BufferError:
                producer.poll(0.01)
    producer.poll(0)
