"""Sinks that raise or never answer, against their contract: they count as unavailable and affect no other sink."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from mailboat.delivery.counters import Totals, WorkerCounters
from mailboat.delivery.publish import SLACK
from mailboat.delivery.stream import STILL_EVERY
from mailboat.errors import EventRefused
from mailboat.model import Message
from mailboat.runtime.relay_status import subscription_status
from mailboat.sinks.protocol import Failures
from mailboat.testing.memory_sink import MemorySink
from support.simulation import (
    DEAD_TOPIC,
    Fleet,
    RunningRelay,
    always,
    attempt_number,
    refusing,
    settings,
    subscription,
)
from support.virtual_time import in_virtual_time, until


class Broken(MemorySink):
    """Sink that fails in the way that ``how`` names, until ``how`` is None."""

    how: str | None = None
    cancelled = 0

    async def open(self) -> None:
        if self.how == "hangs in open":
            await asyncio.sleep(10)
            self.how = "raises in open"
        if self.how == "raises in open":
            raise OSError("ca.pem is gone")
        await super().open()

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        if self.how == "raises at once":
            raise OSError("ca.pem is gone")
        return super().publish(batch) if self.how is None else self._fail()

    async def _fail(self) -> Failures:
        if self.how == "raises a timeout":
            raise TimeoutError("ca.pem is gone")
        if self.how == "is cancelled inside":
            raise asyncio.CancelledError("ca.pem is gone")
        if self.how == "never answers":
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.cancelled += 1
        raise OSError("ca.pem is gone")


def status_of(fleet: Fleet, relay: RunningRelay) -> tuple[bool | None, str]:
    assert relay.session is not None, "the relay lives"
    status = subscription_status(fleet.declared[0], relay.session, Totals())
    return status.sink_reachable, status.last_error or ""


@pytest.mark.parametrize(
    "how", ["raises in open", "raises at once", "raises later", "raises a timeout", "is cancelled inside"]
)
@in_virtual_time
async def test_a_sink_that_raises_counts_as_unavailable_and_is_logged_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mailboat")
    fleet = Fleet([subscription("broken"), subscription("well")], settings(max_attempts=1), new_sink=Broken)
    broken = fleet.sinks["shop/broken"]
    assert isinstance(broken, Broken)
    broken.how = how
    relay = fleet.start()
    events = [event.event_id for event in fleet.write(*"abcabc")]
    await until(lambda: fleet.arrived("shop/well") == events, "the other subscription", within=5)
    await asyncio.sleep(STILL_EVERY + 60)
    reachable, told = status_of(fleet, relay)
    assert not reachable
    assert "the sink failed" in told
    assert "ca.pem" not in told, "nobody knows what is in its text"
    (record,) = (record for record in caplog.records if record.exc_info)
    assert "ca.pem" in str(record.exc_info)
    broken.how = None
    await fleet.all_settled()
    assert fleet.arrived("shop/broken") == events
    assert {attempt_number(message) for message in broken.arrived} == {1}, "G4"
    assert status_of(fleet, relay) == (True, ""), "a success clears the error"
    story = [record.message.partition(":")[0] for record in caplog.records if record.name.endswith("stream")]
    assert story == ["Sink unavailable", "Sink still unavailable", "Sink reachable again"]


@in_virtual_time
async def test_whether_a_destination_is_reachable_is_not_known_before_the_first_answer() -> None:
    fleet = Fleet(new_sink=Broken)
    assert isinstance(fleet.sink, Broken)
    fleet.sink.how = "hangs in open"
    relay = await fleet.started()
    assert status_of(fleet, relay)[0] is None
    await until(lambda: status_of(fleet, relay)[0] is not None, "the first attempt to end")
    assert status_of(fleet, relay)[0] is False
    fleet.sink.how = None
    await until(lambda: bool(status_of(fleet, relay)[0]), "the destination to answer")


@in_virtual_time
async def test_a_sink_that_never_answers_is_given_up_in_time_and_keeps_its_order() -> None:
    fleet = Fleet(new_sink=Broken)
    assert isinstance(fleet.sink, Broken)
    relay = await fleet.started()
    fleet.sink.how = "never answers"
    events = [event.event_id for event in fleet.write(*"abcabcabc")]
    await until(lambda: status_of(fleet, relay)[0] is False, "it to be told", within=1.0 + SLACK + 1.0)
    assert "gave no answer within 11 s" in status_of(fleet, relay)[1]
    assert fleet.sink.cancelled, "what it has in hand must not arrive behind the pump's back"
    fleet.sink.how = None
    await fleet.all_settled()
    assert fleet.arrived() == events


@in_virtual_time
async def test_a_relay_that_stops_waits_for_no_answer_that_never_comes() -> None:
    fleet = Fleet(new_sink=Broken)
    assert isinstance(fleet.sink, Broken)
    fleet.start()
    fleet.sink.how = "never answers"
    fleet.write("a")
    await until(lambda: fleet.sink.publishes or fleet.outbox.cursors, "a beginning")
    async with asyncio.timeout(fleet.timings.drain_within + 1):
        await fleet.stop()


@in_virtual_time
async def test_a_sink_that_never_answers_keeps_no_other_subscription_from_moving_on() -> None:
    fleet = Fleet([subscription("broken"), subscription("well")], new_sink=Broken)
    broken = fleet.sinks["shop/broken"]
    assert isinstance(broken, Broken)
    leaver = fleet.start("leaver")
    await until(lambda: leaver.session is not None and leaver.session.owned, "ownership")
    broken.how = "never answers"
    events = [fleet.write("a")[0].event_id]
    await until(lambda: fleet.arrived("shop/well") == events, "the healthy one")
    stopping = asyncio.create_task(fleet.stop("leaver"))
    fleet.start("follower")
    events += [fleet.write("a")[0].event_id]
    await until(lambda: fleet.arrived("shop/well") == events, "the other relay to move on", within=3)
    assert not stopping.done(), "an answer is still waited for"
    broken.how = None
    await stopping
    await fleet.all_settled()
    assert fleet.arrived("shop/broken") == events


@in_virtual_time
async def test_a_sink_that_raises_for_the_dead_letter_topic_is_retried() -> None:
    class BrokenForTheDead(Broken):
        def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
            if self.how is not None and batch[0].topic is None:
                return MemorySink.publish(self, batch)
            return super().publish(batch)

    fleet = Fleet(streams=settings(max_attempts=1), dead_topic=True, new_sink=BrokenForTheDead)
    assert isinstance(fleet.sink, Broken)
    fleet.sink.how = "raises later"
    poison, other = [event.event_id for event in fleet.write("a", "b")]
    refusing(fleet).times[poison] = 1000
    fleet.start()
    await until(lambda: fleet.arrived() == [other], "the healthy key")
    await asyncio.sleep(30)
    assert not fleet.outbox.dead, "it is not dead before that is told"
    fleet.sink.how = None
    await fleet.all_settled()
    assert [message.event_id for message in fleet.sink.arrived if message.topic == DEAD_TOPIC] == [poison]


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "no memory")], ids=lambda error: type(error).__name__
)
@in_virtual_time
async def test_a_relay_without_memory_blames_no_event(error: Exception) -> None:
    """Guarantee G4: neither new events, nor parked ones, nor dead letters sent to the topic get a counted attempt."""

    class Starved(MemorySink):
        hungry: Callable[[Message], bool] | None = None

        def refusal(self, message: Message) -> EventRefused | None:
            if self.hungry is not None and self.hungry(message):
                raise error
            return super().refusal(message)

    fleet = Fleet(streams=settings(max_attempts=2), dead_topic=True, new_sink=Starved)
    assert isinstance(fleet.sink, Starved)
    events = [event.event_id for event in fleet.write(*"abcabc")]
    fleet.sink.hungry = lambda message: message.event_id in events[2:]
    relay = fleet.start()
    await until(lambda: fleet.arrived() == events[:2], "those that there is memory for")
    await asyncio.sleep(60)
    assert "too little memory" in status_of(fleet, relay)[1]
    refusing(fleet).times.update(always(events[2]))
    fleet.sink.hungry = lambda message: attempt_number(message) == 2
    await until(lambda: set(fleet.arrived()) == set(events) - {events[2], events[5]}, "all but one key")
    await asyncio.sleep(60)
    assert [row.attempts for row in fleet.outbox.parked.values()] == [1, 0]
    fleet.sink.hungry = lambda message: message.topic == DEAD_TOPIC
    await asyncio.sleep(60)
    assert not fleet.outbox.dead
    fleet.sink.hungry = None
    await fleet.all_settled()
    assert [(dead.event.event_id, dead.failure.reason, dead.attempts) for dead in fleet.outbox.dead] == [
        (events[2], "Refused", 2)
    ]
    assert set(fleet.arrived()) == set(events) - {events[2]}
    assert {attempt_number(message) for message in fleet.sink.arrived if not message.topic} == {1}


def test_the_last_error_of_an_ended_worker_has_its_age_until_a_success_clears_it() -> None:
    resource, totals = subscription("orders"), Totals()
    failed, older, delivered = WorkerCounters(), WorkerCounters(), WorkerCounters()
    failed.note_error("no broker", 10.0)
    older.note_error("refused", 5.0)
    delivered.delivered_at = 12.0

    def told_after(ended: WorkerCounters) -> tuple[str | None, float | None]:
        totals.add("shop/orders", ended)
        status = subscription_status(resource, None, totals, now=15.0)
        return status.last_error, status.last_error_age

    assert told_after(failed) == ("no broker", 5.0)
    assert told_after(older) == ("no broker", 5.0)
    assert told_after(delivered) == (None, None)
