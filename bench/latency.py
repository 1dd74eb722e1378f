"""How long after its commit an event is in a consumer's hands, under a steady trickle.

Writers and consumer are two processes, so that neither waits for the other's interpreter; both read the machine's one
monotonic clock.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psycopg
from confluent_kafka import Consumer, Message
from measurement import in_own_process
from setup import PAYLOAD_BYTES, Relay, Stage

import mailboat
from mailboat_harbor.missing import ServerFailed

_WRITERS = 4
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds between commit and receipt."""

    sorted_seconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        return self.sorted_seconds[min(int(len(self.sorted_seconds) * share), len(self.sorted_seconds) - 1)]


def measure(stage: Stage, url: str, topic: str, *, rate: int, seconds: float) -> Latency:
    """One relay, events committed one by one at that rate."""
    with Relay(stage, url, topic) as relay:
        relay.until_ready()
        receiver = _Receiver(stage.broker.bootstrap, topic)
        committed = in_own_process(write, url, rate, seconds)
        received = receiver.finish(len(committed))
        if missing := len(committed.keys() - received.keys()):
            raise ServerFailed(f"{missing} of {len(committed)} events did not arrive.\n{relay.log_tail()}")
    return Latency(tuple(sorted(received[event] - at for event, at in committed.items())))


def write(url: str, rate: int, seconds: float) -> dict[str, float]:
    """Event id -> when its commit had returned."""
    committed: dict[str, float] = {}
    gate = threading.Barrier(_WRITERS)
    each = (url, int(rate * seconds) // _WRITERS, _WRITERS / rate, gate, committed)
    threads = [threading.Thread(target=_write_some, args=(number, *each)) for number in range(_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return committed


def _write_some(
    number: int, url: str, events: int, interval: float, gate: threading.Barrier, committed: dict[str, float]
) -> None:
    payload = b"x" * PAYLOAD_BYTES
    with psycopg.connect(url) as connection:
        gate.wait()
        due = time.monotonic() + interval * number / _WRITERS
        for count in range(events):
            time.sleep(max(0.0, due - time.monotonic()))
            due += interval
            event = mailboat.emit(connection, "order.placed", payload, key=f"order-{number}-{count % 100}")
            connection.commit()
            committed[str(event)] = time.monotonic()


class _Receiver:
    """A consumer on a thread; notes when it first saw which event."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "latency",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._received: dict[str, float] = {}
        self._enough = threading.Event()
        self._assigned = threading.Event()
        self._consumer.subscribe([topic], on_assign=lambda *_: self._assigned.set())
        self._thread = threading.Thread(target=self._receive, name="bench-receiver", daemon=True)
        self._thread.start()
        if not self._assigned.wait(_PATIENCE):
            raise TimeoutError("the broker gave the consumer no partitions")

    def finish(self, expected: int) -> dict[str, float]:
        """What has come once all are there, or once waiting is in vain."""
        deadline = time.monotonic() + _PATIENCE
        while len(self._received) < expected and time.monotonic() < deadline:
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
                self._received.setdefault(_event_id(message), now)


def _event_id(message: Message) -> str:
    headers = dict(message.headers() or [])
    value = headers["ce_id"]
    return value.decode() if isinstance(value, bytes) else str(value)
