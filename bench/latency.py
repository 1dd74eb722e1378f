"""Latency from the commit of an event to its receipt by a consumer, at a steady rate.

Writers and consumer are two processes, so that neither waits for the interpreter of the other. Both read the monotonic
clock of the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psycopg
from confluent_kafka import Consumer, Message
from setup import PAYLOAD_BYTES

import mailboat

_FEWEST_WRITERS, _MOST_WRITERS, _RATE_OF_A_WRITER = 4, 16, 200
_PATIENCE = 60.0
_PAYLOAD = b"x" * PAYLOAD_BYTES
Insert = Callable[[psycopg.Connection, str], object]
"""Importable function that inserts one event of the key and returns its id.

Another process calls the function.
"""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds between commit and receipt."""

    sorted_seconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        return self.sorted_seconds[min(int(len(self.sorted_seconds) * share), len(self.sorted_seconds) - 1)]


def emit(connection: psycopg.Connection, key: str) -> object:
    """Emit one event and return its id."""
    return mailboat.emit(connection, "order.placed", _PAYLOAD, key=key)


def write(url: str, rate: int, seconds: float, insert: Insert = emit) -> dict[str, float]:
    """Commit one event per transaction at the rate. Return the times at which the commits returned, by event id."""
    committed: dict[str, float] = {}
    writers = min(max(_FEWEST_WRITERS, rate // _RATE_OF_A_WRITER), _MOST_WRITERS)
    gate = threading.Barrier(writers)
    each = (url, int(rate * seconds) // writers, writers / rate, gate, committed, insert)
    threads = [threading.Thread(target=_write_some, args=(number, *each)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return committed


def _write_some(
    number: int,
    url: str,
    events: int,
    interval: float,
    gate: threading.Barrier,
    committed: dict[str, float],
    insert: Insert,
) -> None:
    with psycopg.connect(url) as connection:
        gate.wait()
        due = time.monotonic() + interval * number / gate.parties
        for count in range(events):
            time.sleep(max(0.0, due - time.monotonic()))
            due += interval
            event = insert(connection, f"order-{number}-{count % 100}")
            connection.commit()
            committed[str(event)] = time.monotonic()


class Receiver:
    """Consumer on a thread that records the first receipt of each event, by topic."""

    def __init__(self, bootstrap: str, topics: Sequence[str], event_id: Callable[[Message], str]) -> None:
        """``event_id`` reads the id of a message."""
        self._event_id = event_id
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"latency-{topics[0]}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._received: dict[str, dict[str, float]] = {topic: {} for topic in topics}
        self._enough = threading.Event()
        self._assigned = threading.Event()
        self._consumer.subscribe(list(topics), on_assign=lambda *_: self._assigned.set())
        self._thread = threading.Thread(target=self._receive, name="bench-receiver", daemon=True)
        self._thread.start()
        if not self._assigned.wait(_PATIENCE):
            raise TimeoutError("the broker gave the consumer no partitions")

    def finish(self, expected: Collection[str]) -> dict[str, dict[str, float]]:
        """Return the arrivals once every topic has all of these events, or after a timeout.

        A topic may also have events of an earlier measurement.
        """
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if all(event in arrivals for arrivals in self._received.values() for event in expected):
                break
            time.sleep(0.01)
        self._enough.set()
        self._thread.join()
        self._consumer.close()
        return self._received

    def _receive(self) -> None:
        while not self._enough.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                now = time.monotonic()
                self._received[message.topic() or ""].setdefault(self._event_id(message), now)


def event_id(message: Message, header: str = "ce_id") -> str:
    """Return the event id in the header of a message."""
    value = dict(message.headers() or [])[header]
    return value.decode() if isinstance(value, bytes) else str(value)
