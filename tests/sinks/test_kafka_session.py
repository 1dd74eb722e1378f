"""One producer of the Kafka sink from its first message to its first failure, with a client that does as it is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from mailboat.errors import EventRefused, Undecided
from mailboat.sinks.kafka.session import Call, Session
from mailboat.sinks.key_stops import KeyStops
from support.sink_backends import message
from support.wait import await_until

Report = Callable[[KafkaError | None, Any], None]


class Place:
    """What librdkafka hands to a callback beside the error."""

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0


class ToldClient:
    """A producer whose answers come when the test says so. What is purged is reported at the next poll, as it is."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.on_the_way: list[Report] = []
        self._reports: list[tuple[Report, KafkaError | None]] = []

    def produce(self, topic: str, value: bytes, key: str, partition: int, report: Report, *_: object) -> None:
        self.on_the_way.append(report)

    def answer(self, error: KafkaError | None = None) -> None:
        """The first message on the way."""
        self._reports.append((self.on_the_way.pop(0), error))

    def purge(self, **_: object) -> None:
        while self.on_the_way:
            self.answer(KafkaError(KafkaError._PURGE_INFLIGHT))

    def poll(self, timeout: float) -> int:
        reports, self._reports = self._reports, []
        for report, error in reports:
            report(error, Place())
        return len(reports)


async def handed_over(session: Session, stops: KeyStops, number: int, key: str) -> Call:
    hold = stops.call()
    hold.begin()
    call = session.begin([message(number, key)], hold)
    await session.hand_over(call)
    return call


async def test_who_waits_for_a_session_to_be_idle_hears_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is stopped by a failure first, and the reports of what was purged come a moment later."""
    monkeypatch.setattr("mailboat.sinks.kafka.session.Producer", ToldClient)
    session, stops = Session({"bootstrap.servers": "k:1"}, "orders", 1, logger=logging.getLogger("test")), KeyStops()
    client = session._producer
    refused, purged = [await handed_over(session, stops, number, f"key-{number}") for number in range(2)]
    idle = asyncio.create_task(session.idle())
    await asyncio.sleep(0)

    client.answer(KafkaError(KafkaError.POLICY_VIOLATION))

    async with asyncio.timeout(5):
        await idle
    assert isinstance(refused.failures[0], EventRefused)
    assert isinstance(purged.failures[0], Undecided)
    await await_until(lambda: session.gone, what="the end of the producer")
