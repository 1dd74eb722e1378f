"""Delivery by a relay: order, attempts, parked keys, outages. One scenario per test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

import pytest

from mailboat.delivery.stream import Checkpoint
from mailboat.errors import EventRefused
from mailboat.model import Message
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, Traits
from mailboat.store.outbox_store import Parked
from mailboat.store.settings import ReadLimits
from mailboat.testing.memory_sink import MemorySink
from support.memory_outbox import MemoryStore
from support.simulation import Fleet, always, attempt_number, refusing, sequence_number, settings, subscription
from support.virtual_time import in_virtual_time, until

CAREFUL = Traits(header_prefix="ce_", stops_behind_failure=False)


@in_virtual_time
async def test_events_arrive_in_order_with_their_numbers() -> None:
    fleet = Fleet()
    fleet.start()
    events = [event for n in range(5) for event in fleet.write("a", f"b{n}", None)]
    await fleet.all_settled()
    assert fleet.arrived() == [event.event_id for event in events]
    assert [sequence_number(m) for m in fleet.sink.arrived] == list(range(1, 16))
    assert {attempt_number(m) for m in fleet.sink.arrived} == {1}


@pytest.mark.parametrize("tells_which", [True, False])
@pytest.mark.parametrize("traits", [None, CAREFUL], ids=["overlapped", "one per key"])
@in_virtual_time
async def test_a_poison_event_stops_its_key_only_and_nothing_passes_it(
    tells_which: bool, traits: Traits | None
) -> None:
    fleet = Fleet()
    if traits is not None:
        fleet.sink.traits = traits
    poisoned, other = [], []
    for _ in range(6):
        first, second = fleet.write("a", "b")
        poisoned.append(first.event_id)
        other.append(second.event_id)
    refusals = refusing(fleet, tells_which)
    refusals.times.update(always(poisoned[2]))
    fleet.start()
    await until(lambda: set(other) <= set(fleet.arrived()), "all events of the other key")
    assert [e for e in fleet.arrived() if e in poisoned] == poisoned[:2], "G2: nothing behind it until it is settled"
    await fleet.all_settled()
    assert [e for e in fleet.arrived() if e in poisoned] == poisoned[:2] + poisoned[3:]
    assert [e for e in fleet.arrived() if e in other] == other
    (dead,) = fleet.outbox.dead
    assert (dead.event.event_id, dead.attempts, dead.sequence) == (poisoned[2], 3, 5)
    assert not fleet.outbox.parked


@in_virtual_time
async def test_an_event_that_is_refused_twice_arrives_at_the_third_attempt_and_before_its_siblings() -> None:
    fleet = Fleet()
    events = [event.event_id for event in fleet.write("a", "a", "a", "b")]
    refusals = refusing(fleet)
    refusals.times[events[0]] = 2
    fleet.start()
    await fleet.all_settled()
    assert fleet.arrived() == [events[3], *events[:3]]
    attempts = {m.event_id: attempt_number(m) for m in fleet.sink.arrived}
    assert attempts == {events[0]: 3, events[1]: 1, events[2]: 1, events[3]: 1}
    sequences = {m.event_id: sequence_number(m) for m in fleet.sink.arrived}
    assert [sequences[event_id] for event_id in events] == [1, 2, 3, 4]


@pytest.mark.parametrize("point", [Checkpoint.BATCH_TAKEN, Checkpoint.ANSWERED])
@in_virtual_time
async def test_an_unexpected_error_outside_the_task_of_a_worker_ends_the_session(point: Checkpoint) -> None:
    def fail(passed: Checkpoint) -> None:
        if passed is point:
            raise RuntimeError("unexpected")

    fleet = Fleet(on_checkpoint=fail)
    relay = await fleet.started()
    await asyncio.sleep(1)
    fleet.write("a")
    await asyncio.wait({relay.task}, timeout=10)
    del fleet.relays["relay"]
    with pytest.raises(RuntimeError, match="unexpected"):
        relay.task.result()


class WeighingSink(MemorySink):
    """Sink that records the bytes of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        self.batches.append(sum(len(message.value or b"") for message in batch))
        return super().publish(batch)


@in_virtual_time
async def test_large_events_are_never_many_in_memory_at_once_not_even_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    async def queue(store: MemoryStore, *arguments: Any) -> list[Parked]:
        found = await read_queue(store, *arguments)
        read.append(sum(len(parked.event.payload or b"") for parked in found))
        return found

    read_queue = MemoryStore.queue
    monkeypatch.setattr(MemoryStore, "queue", queue)
    fleet = Fleet(streams=settings(batch_size=50, batch_bytes=310), new_sink=WeighingSink)
    await fleet.started()
    fleet.sink.go_away()
    events = [event.event_id for event in fleet.write(*["a"] * 20, *["b"] * 20, payload=b"." * 100)]
    refusals = refusing(fleet, tells_which=False)
    refusals.times.update({events[0]: 2, events[25]: 1})
    await asyncio.sleep(5)
    fleet.sink.come_back()
    await fleet.all_settled()
    for key in (events[:20], events[20:]):
        assert [e for e in fleet.arrived() if e in key] == key
    assert isinstance(fleet.sink, WeighingSink)
    assert max(fleet.sink.batches) == 300
    assert max(read) == 300


@in_virtual_time
async def test_an_event_that_cannot_be_sent_is_dead_at_once_and_its_key_continues() -> None:
    fleet = Fleet()
    fleet.sink.max_value_bytes = 10
    before = fleet.write("a", "b")
    (large,) = fleet.write("a", payload=b"x" * 11)
    behind = fleet.write("a", "b", "a")
    fleet.start()
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted(event.event_id for event in [*before, *behind])
    (dead,) = fleet.outbox.dead
    assert (dead.event, dead.attempts, dead.failure.reason) == (large, 1, "TooLarge")


@in_virtual_time
async def test_an_outage_costs_no_attempt_and_delivery_resumes() -> None:
    fleet = Fleet(streams=settings(max_attempts=1))
    relay = await fleet.started()
    fleet.sink.go_away("no route to host")
    events = [event.event_id for event in fleet.write(*"abcabcabc")]
    await asyncio.sleep(30)
    assert relay.session is not None
    (owned,) = relay.session.owned.values()
    assert owned.worker.stream.health.reason == "no route to host"
    assert not fleet.arrived()
    fleet.sink.come_back()
    await until(lambda: len(fleet.arrived()) == 9, "delivery", within=10)
    await fleet.all_settled()
    assert fleet.arrived() == events
    assert {attempt_number(m) for m in fleet.sink.arrived} == {1}
    assert not fleet.outbox.dead
    assert owned.worker.stream.health.reason is None


async def paused_during_an_outage(fleet: Fleet) -> list[str]:
    """Pause the subscription while the sink is unavailable and a batch is in flight, and return the events.

    The sink is available again afterwards.
    """
    await fleet.started()
    fleet.sink.go_away()
    events = [event.event_id for event in fleet.write(*"abcabc")]
    await until(lambda: fleet.sink.publishes, "an attempt")
    fleet.outbox.pause(1, True)
    await asyncio.sleep(10)
    fleet.sink.come_back()
    return events


@in_virtual_time
async def test_a_pause_during_an_outage_holds_back_the_batch_in_flight_too() -> None:
    fleet = Fleet()
    events = await paused_during_an_outage(fleet)
    await asyncio.sleep(30)
    assert not fleet.arrived()
    fleet.outbox.pause(1, False)
    await fleet.all_settled()
    assert fleet.arrived() == events


@in_virtual_time
async def test_a_relay_stopped_during_a_back_off_leaves_its_batch_to_the_next_owner() -> None:
    fleet = Fleet()
    events = await paused_during_an_outage(fleet)
    async with asyncio.timeout(1):
        await fleet.stop()
    assert not fleet.arrived()
    fleet.start("heir")
    fleet.outbox.pause(1, False)
    await fleet.all_settled()
    assert fleet.arrived() == events


class SlowSink(MemorySink):
    """Sink that takes one second per batch.

    Batches are serialized, since timers that end at the same time have no order.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._one_at_a_time = asyncio.Lock()

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        return self._slowly(super().publish(batch))

    async def _slowly(self, answers: Coroutine[Any, Any, Failures]) -> Failures:
        async with self._one_at_a_time:
            await asyncio.sleep(1.0)
            return await answers


@in_virtual_time
async def test_a_pause_also_holds_back_the_events_behind_a_parked_event() -> None:
    fleet = Fleet(streams=settings(batch_size=2), new_sink=SlowSink)
    first, *rest = [event.event_id for event in fleet.write(*"aaaaaaaaaa")]
    refusing(fleet).times[first] = 1
    fleet.start()
    await until(lambda: first in fleet.arrived(), "the parked event")
    fleet.outbox.pause(1, True)
    await asyncio.sleep(30)
    assert len(fleet.arrived()) < 6
    fleet.outbox.pause(1, False)
    await fleet.all_settled()
    assert fleet.arrived() == [first, *rest]


@in_virtual_time
async def test_parked_events_wait_for_an_outage_without_losing_an_attempt() -> None:
    fleet = Fleet()
    (event,) = fleet.write("a")
    refusals = refusing(fleet)
    refusals.times[event.event_id] = 1
    fleet.start()
    await until(lambda: fleet.outbox.parked, "parking")
    fleet.sink.go_away()
    await asyncio.sleep(60)
    (row,) = fleet.outbox.parked.values()
    assert row.attempts == 1
    fleet.sink.come_back()
    await fleet.all_settled()
    (message,) = fleet.sink.arrived
    assert attempt_number(message) == 2


@in_virtual_time
async def test_without_ordering_a_failed_event_blocks_no_other() -> None:
    fleet = Fleet(streams=settings(ordered=False))
    first, *rest = [event.event_id for event in fleet.write(*"aaaaaa")]
    refusals = refusing(fleet)
    refusals.times[first] = 2
    fleet.start()
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted([first, *rest])
    assert fleet.arrived()[-1] == first


@in_virtual_time
async def test_a_change_to_no_ordering_sends_events_behind_a_failed_one() -> None:
    fleet = Fleet()
    events = fleet.write(*"aaa")
    refusals = refusing(fleet)
    refusals.times[events[0].event_id] = 1
    fleet.start()
    await until(lambda: len(fleet.outbox.parked) == 3, "parking")
    await fleet.stop()
    assert fleet.arrived() == []
    fleet.streams = settings(ordered=False)
    fleet.start()
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted(event.event_id for event in events)


@in_virtual_time
async def test_a_change_to_ordering_sends_failed_events_in_order() -> None:
    fleet = Fleet()
    events = [event.event_id for event in fleet.write(*"aaa")]
    refusals = refusing(fleet)
    refusals.times[events[0]] = 1
    fleet.start()
    await until(lambda: len(fleet.outbox.parked) == 3, "parking")
    await fleet.stop()
    for row in fleet.outbox.parked.values():  # as left by a relay without ordering: the last event is due first
        row.next_attempt_at = fleet.outbox.now() + timedelta(seconds=60 - 10 * row.sequence)
    fleet.start()
    await fleet.all_settled()
    assert fleet.arrived() == events


@in_virtual_time
async def test_a_refusal_in_a_later_flight_is_not_overtaken_while_an_earlier_one_is_still_out() -> None:
    """The second batch fails before the first has an answer. Events that are read after that must wait (G2)."""

    class SlowFirst(MemorySink):
        def __init__(self) -> None:
            super().__init__()
            self.first = asyncio.Event()
            self.calls = 0

        async def publish(self, batch: Sequence[Message]) -> Failures:
            self.calls += 1
            if self.calls == 1:
                self.arrived += batch
                await self.first.wait()
                return ALL_DELIVERED
            if self.calls == 2:
                return {0: EventRefused("not this one")}
            return await super().publish(batch)

    fleet = Fleet(streams=settings(batch_size=1), limits=ReadLimits(small_rows=1, rows=2), new_sink=SlowFirst)
    fleet.outbox.latency = lambda: 0.05
    assert isinstance(fleet.sink, SlowFirst)
    events = [event.event_id for event in fleet.write("b", "a", "a", "a")]
    fleet.start()
    await until(lambda: fleet.sink.calls >= 2, "two batches in flight")  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    fleet.sink.first.set()
    await fleet.all_settled()
    assert fleet.arrived() == events


@in_virtual_time
async def test_one_failing_sink_never_slows_another_subscription() -> None:
    fleet = Fleet(declared=[subscription("good", partitions=2), subscription("bad", partitions=2)])
    fleet.sinks["shop/bad"].go_away()
    fleet.start()
    for _ in range(20):
        fleet.write(*"abcdefgh")
        await asyncio.sleep(0.05)
    await until(lambda: len(fleet.arrived("shop/good")) == 160, "the good one's events", within=2)
    assert not fleet.arrived("shop/bad")
    fleet.sinks["shop/bad"].come_back()
    await fleet.all_settled()
    assert len(fleet.arrived("shop/bad")) == 160
