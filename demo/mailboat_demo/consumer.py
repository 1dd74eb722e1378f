"""The consumer: an ordinary Kafka consumer that records messages in the order of arrival."""

from __future__ import annotations

import json
import threading
from typing import Final, cast

from confluent_kafka import Consumer, Message

from mailboat_demo.verification import Arrival

_POLL: Final = 0.1


class ReceivedMessages:
    """Messages in the order of arrival."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.arrivals: list[Arrival] = []
        self.distinct = 0
        self.failure: Exception | None = None
        self._seen: set[str] = set()
        self._closed = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "demo",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._consumer.subscribe([topic])
        self._thread = threading.Thread(target=self._receive, name="demo-consumer")
        self._thread.start()

    @property
    def duplicates(self) -> int:
        return len(self.arrivals) - self.distinct

    def has(self, key: str, *, replay: bool) -> bool:
        """Return whether a message of that key arrived, as a replay or as a first delivery."""
        return any(arrival.key == key and arrival.replay == replay for arrival in self.arrivals[:])

    def close(self) -> None:
        """Stop the consumer. Safe to call twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._consumer.close()

    def _receive(self) -> None:
        try:
            while not self._closed.is_set():
                message = self._consumer.poll(_POLL)
                if message is not None and message.error() is None:
                    self._note(arrival_of(message))
        except Exception as error:
            self.failure = error  # raised by the scenario on the main thread

    def _note(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        if arrival.event_id not in self._seen:
            self._seen.add(arrival.event_id)
            self.distinct += 1


def arrival_of(message: Message) -> Arrival:
    """Return the fields of a message that the proof needs."""
    received = cast("list[tuple[str, bytes]]", message.headers() or [])
    headers = {name: value.decode() for name, value in received}
    data = json.loads(message.value() or b"{}")
    return Arrival(headers["ce_id"], data["order"], data["version"], headers.get("mailboat-replay") == "true")
