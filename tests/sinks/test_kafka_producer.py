"""One producer of the Kafka sink from its first message to its first failure, with a scripted client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.sinks.kafka.producer import ProducerEpoch
from mailboat.sinks.kafka.producer_share import ProducerShare, PublishCall
from mailboat.sinks.key_fence import FenceTicket, KeyFence
from support.sink_backends import message
from support.wait import await_until

Report = Callable[[KafkaError | None, Any], None]
LIMIT = 10


class Place:
    """The message argument of a delivery callback."""

    def __init__(self, topic: str) -> None:
        self.topic = lambda: topic
        self.partition = lambda: 0


class ScriptedClient:
    """A producer with answers by the test. As in librdkafka, purged messages are reported at the next poll."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.in_flight: list[tuple[str, Report]] = []
        self._reports: list[tuple[str, Report, KafkaError | None]] = []

    def __len__(self) -> int:
        return len(self.in_flight) + len(self._reports)

    def produce(self, topic: str, value: bytes, key: str, partition: int, report: Report, *_: object) -> None:
        self.in_flight.append((topic, report))

    def topics(self) -> list[str]:
        return [topic for topic, _ in self.in_flight]

    def answer(self, code: int | None = None) -> None:
        """Answer the first message in flight."""
        self._reports.append((*self.in_flight.pop(0), None if code is None else KafkaError(code)))

    def purge(self, **_: object) -> None:
        while self.in_flight:
            self.answer(KafkaError._PURGE_INFLIGHT)

    def poll(self, timeout: float) -> int:
        reports, self._reports = self._reports, []
        for topic, report, error in reports:
            report(error, Place(topic))
        return len(reports)


@pytest.fixture
async def session(monkeypatch: pytest.MonkeyPatch) -> ProducerEpoch:
    monkeypatch.setattr("mailboat.sinks.kafka.producer.Producer", ScriptedClient)
    settings = {
        "bootstrap.servers": "k:1",
        "queue.buffering.max.messages": str(LIMIT),
        "queue.buffering.max.kbytes": "1024",
    }
    return ProducerEpoch(settings)


def begun(share: ProducerShare, *numbers: int) -> PublishCall:
    hold = FenceTicket(KeyFence())
    hold.begin()
    return share.begin([message(number, f"key-{number}") for number in numbers], hold)


async def handed_over(share: ProducerShare, *numbers: int) -> PublishCall:
    call = begun(share, *numbers)
    await share.hand_over(call)
    return call


async def answer(call: PublishCall) -> dict[int, DeliveryError]:
    async with asyncio.timeout(10):
        await call.done.wait()
    return call.failures


async def test_waiting_for_an_idle_lane_ends_with_the_session(session: ProducerEpoch) -> None:
    """A failure stops the session before the reports of purged messages arrive."""
    share = session.new_share("orders")
    refused, purged = [await handed_over(share, number) for number in range(2)]
    idle = asyncio.create_task(share.idle())
    await asyncio.sleep(0)

    session.producer.answer(KafkaError.POLICY_VIOLATION)

    async with asyncio.timeout(10):
        await idle
    assert isinstance(refused.failures[0], EventRefused)
    assert isinstance(purged.failures[0], Undecided)
    await await_until(lambda: session.closing and session.closing.done(), what="the end of the producer")


@pytest.mark.parametrize(
    ("code", "expected", "at_fault"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, EventRefused, True),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, SinkUnavailable, True),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, SinkUnavailable, True),
        (KafkaError.SASL_AUTHENTICATION_FAILED, SinkUnavailable, False),
    ],
)
async def test_a_failure_on_one_topic_costs_other_topics_no_attempt(
    session: ProducerEpoch, code: int, expected: type[DeliveryError], at_fault: bool
) -> None:
    orders, bills = session.new_share("orders"), session.new_share("bills")
    failed, delivered, purged = [await handed_over(share, 1) for share in (orders, bills, bills)]
    unsent = begun(bills, 2)

    session.producer.answer(code)
    session.producer.answer()
    await bills.hand_over(unsent)

    assert type((await answer(failed))[0]) is expected
    assert await answer(delivered) == {}
    assert [type((await answer(call))[0]) for call in (purged, unsent)] == [SinkUnavailable] * 2
    assert ("another subscription" in str(purged.failures[0])) == at_fault
    assert (orders.at_fault, bills.at_fault) == (at_fault, False)


async def test_if_no_report_names_a_cause_every_lane_in_use_is_at_fault_and_undecided(
    session: ProducerEpoch,
) -> None:
    shares = [session.new_share(topic) for topic in ("orders", "bills", "idle")]
    calls = [await handed_over(share, 1, 2) for share in shares[:2]]

    session.producer.answer(KafkaError._FATAL)

    assert [[type(error) for error in (await answer(call)).values()] for call in calls] == [[Undecided] * 2] * 2
    assert [share.at_fault for share in shares] == [True, True, False]


@pytest.mark.parametrize("others_got_answers", [True, False])
async def test_a_time_out_is_the_fault_of_a_topic_if_others_were_answered(
    session: ProducerEpoch, others_got_answers: bool
) -> None:
    orders, bills = session.new_share("orders"), session.new_share("bills")
    answered = await handed_over(bills, 0)
    if others_got_answers:
        silent = begun(orders, 1)
    session.producer.answer()
    assert await answer(answered) == {}
    if not others_got_answers:
        silent = begun(orders, 1)
    await orders.hand_over(silent)
    purged = await handed_over(bills, 2)

    orders.time_out(silent, SinkUnavailable("no answer"))

    assert str((await answer(silent))[0]) == "no answer"
    assert orders.at_fault == others_got_answers
    assert (str((await answer(purged))[0]) == "no answer") != others_got_answers
    assert not bills.at_fault


async def test_a_slow_topic_leaves_room_in_the_queue_for_others(
    session: ProducerEpoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mailboat.sinks.kafka.producer_share._SLICE", 1)
    orders, bills = session.new_share("orders"), session.new_share("bills")
    many = begun(orders, *range(20))
    handing = asyncio.create_task(orders.hand_over(many))
    client = session.producer
    await await_until(lambda: len(client) == LIMIT // 2, what="half of the queue to be full")

    few = await handed_over(bills, 1, 2)
    assert client.topics() == ["orders"] * (LIMIT // 2) + ["bills"] * 2

    while not (many.done.is_set() and few.done.is_set()):
        if client.in_flight:
            client.answer()
        await asyncio.sleep(0)
    await handing
    assert (many.failures, few.failures) == ({}, {})


async def test_withdrawing_a_call_without_messages_in_flight_does_not_end_the_session(session: ProducerEpoch) -> None:
    orders, bills = session.new_share("orders"), session.new_share("bills")
    waits, sent = begun(orders, 1), await handed_over(bills, 2)
    waits.expected = 0  # the hand-over ended before the first message

    assert not bills.withdraw(sent, SinkUnavailable("no answer"))
    assert orders.withdraw(waits, SinkUnavailable("no answer"))
    session.producer.answer()

    assert str((await answer(waits))[0]) == "no answer"
    assert await answer(sent) == {}
    assert not session.stopped
    for share in (orders, bills):
        session.leave(share)
    await await_until(
        lambda: session.closing and session.closing.done(), what="the end of the producer with its last share"
    )
