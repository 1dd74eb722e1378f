"""Timing of ticks: one poll serves all partitions whose batches end at about the same time.

Later batches do not delay the poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from mailboat.delivery.poll_interval import WakeSettings
from mailboat.model import Message, OutboxEvent
from mailboat.runtime.relay_status import stalled
from mailboat.sinks.protocol import Failures
from mailboat.store.outbox_store import CursorGroup, CursorKey, Lease, Measured, Settlement, TickResult, Window
from mailboat.store.settings import ReadLimits
from mailboat.testing.memory_sink import MemorySink
from support.memory_outbox import MemoryOutbox, MemoryStore
from support.memory_outbox.rows import MemoryRow
from support.simulation import Fleet, subscription
from support.virtual_time import in_virtual_time, until


class Distant(MemorySink):
    """Sink that answers late."""

    seconds = 0.002

    async def publish(self, batch: Sequence[Message]) -> Failures:
        failures = await super().publish(batch)
        await asyncio.sleep(self.seconds)
        return failures


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of cursor groups that each tick polled."""
    counted: list[int] = []
    tick = MemoryStore.tick

    async def counting(
        store: MemoryStore,
        settlements: Sequence[Settlement],
        groups: Sequence[CursorGroup],
        measured: Sequence[Measured],
    ) -> TickResult:
        counted.append(len(groups))
        await asyncio.sleep(0.003)  # about the duration in a database
        return await tick(store, settlements, groups, measured)

    monkeypatch.setattr(MemoryStore, "tick", counting)
    return counted


async def trickle(fleet: Fleet, events: int) -> None:
    for number in range(events):
        fleet.write(f"key {number % 50}")
        await asyncio.sleep(0.0021)


def _near_has(fleet: Fleet, event_id: str) -> bool:
    return event_id in fleet.arrived("shop/near")


def test_one_poll_serves_all_partitions_of_a_busy_subscription(looks: list[int]) -> None:
    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(declared=[subscription(partitions=8)], new_sink=Distant)
        fleet.start()
        await trickle(fleet, 300)
        await fleet.all_settled()
        await fleet.stop()

    story()
    apart = sum(count > 1 for count in looks)
    assert apart < len(looks) / 10, f"{apart} of {len(looks)} ticks looked for partitions apart from each other"


def test_a_distant_destination_keeps_no_other_waiting(looks: list[int]) -> None:
    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(declared=[subscription("near"), subscription("far")], new_sink=Distant)
        far = fleet.sinks["shop/far"]
        assert isinstance(far, Distant)
        far.seconds = 0.5
        fleet.start()
        await trickle(fleet, 50)
        for _ in range(20):
            (event,) = fleet.write("key")
            await until(partial(_near_has, fleet, event.event_id), "it", within=0.025)
        await fleet.stop()

    story()


def test_no_notification_is_requested_while_no_cursor_polls() -> None:
    """A NOTIFY costs every writer time (G10). A relay with a backlog, or without partitions, must not request one."""

    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(limits=ReadLimits(small_rows=2, rows=4))
        fleet.sink.go_away()
        fleet.write(*["key"] * 20)
        fleet.start()
        await until(
            lambda: any(cursor.window_snapshot for cursor in fleet.outbox.cursors.values()), "a window that is open"
        )
        for _ in range(100):
            assert not fleet.outbox.bells, "there is a backlog, and nowhere to go with it"
            await asyncio.sleep(0.05)
        fleet.sink.come_back()
        await fleet.all_settled()
        await until(lambda: fleet.outbox.bells, "the relay to sleep")
        fleet.outbox.assign(1, {0: "another"})
        fleet.start("another")
        await until(lambda: set(fleet.outbox.bells) == {"another"}, "the owner to sleep, and nobody else")
        await fleet.end()

    story()


def test_few_events_cost_a_notification_each_and_no_polls_between_them(looks: list[int]) -> None:
    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(declared=[subscription(partitions=8)], new_sink=Distant)
        fleet.start()
        await until(lambda: fleet.outbox.bells, "the relay to sleep")
        fleet.write("the first one")
        await asyncio.sleep(1.0)
        before = len(looks)
        for number in range(50):
            fleet.write(f"key {number}")
            await asyncio.sleep(0.1)
            assert fleet.outbox.bells, "writers go on notifying"
        assert len(fleet.arrived()) == 51
        assert len(looks) - before <= 2 * 50
        await fleet.stop()

    story()


@pytest.mark.parametrize("pause", [0.0007, 0.0023, 0.0041, 0.0059, 0.0083, 0.03, 0.11])
def test_no_wake_up_is_lost_in_any_state_of_the_committer(looks: list[int], pause: float) -> None:
    """The next poll, which would find the event as well, is ten minutes away."""

    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(wake=WakeSettings(poll=600.0, longest=600.0), new_sink=Distant)
        fleet.start()
        await until(lambda: fleet.outbox.bells, "the relay to sleep")
        for number in range(200):
            fleet.write(f"key {number}")
            await asyncio.sleep(pause * (1 + number % 3))
        await until(lambda: len(fleet.arrived()) == 200, "all of them", within=1)
        await fleet.stop()

    story()


def test_a_wakeup_during_the_query_for_open_transactions_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay queries open transactions after every empty poll.

    A writer that commits meanwhile has already sent its NOTIFY, and no other one follows.
    """
    asking = asyncio.Event()
    undecided_writers = MemoryStore.undecided_writers

    async def slowly(store: MemoryStore) -> bool:
        asking.set()
        await asyncio.sleep(0.005)
        return await undecided_writers(store)

    monkeypatch.setattr(MemoryStore, "undecided_writers", slowly)

    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(wake=WakeSettings(poll=600.0, longest=600.0))
        fleet.start()
        fleet.write("key")
        await fleet.all_settled()
        asking.clear()
        await asking.wait()
        assert fleet.outbox.bells, "the doorbell hangs out"
        fleet.write("key")
        await until(lambda: len(fleet.arrived()) == 2, "it", within=1)
        await fleet.stop()

    story()


def test_others_are_served_while_a_large_window_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring may take minutes if a subscription was paused for days. The relay cancels it at a release."""
    measure = MemoryStore.measure

    async def slowly(store: MemoryStore, group: CursorGroup) -> Window | None:
        await asyncio.sleep(300)
        return await measure(store, group)

    monkeypatch.setattr(MemoryStore, "measure", slowly)

    @in_virtual_time
    async def story() -> None:
        declared = [subscription("behind"), subscription("near", start={"from": "Latest"})]
        fleet = Fleet(declared=declared, limits=ReadLimits(small_rows=5, rows=4))
        written = fleet.write(*["key"] * 20)
        fleet.start()
        await until(lambda: fleet.relays["relay"].session is not None, "the relay")
        await asyncio.sleep(1)
        for _ in range(100):
            (event,) = fleet.write("key")
            written.append(event)
            await until(partial(_near_has, fleet, event.event_id), "it", within=2)
        assert not fleet.arrived("shop/behind")
        await fleet.stop()
        fleet.start()
        await until(lambda: len(fleet.arrived("shop/behind")) >= len(written), "all of the backlog", within=700)
        assert fleet.arrived("shop/behind") == [event.event_id for event in written]
        await fleet.stop()

    story()


def _stands_still(fleet: Fleet) -> bool:
    session = fleet.relays["relay"].session
    return session is not None and stalled(session, asyncio.get_running_loop().time())


@pytest.mark.parametrize("longest", [60.0, 3600.0])
def test_an_idle_relay_is_alive_however_seldom_it_polls(longest: float) -> None:
    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(wake=WakeSettings(longest=longest))
        fleet.start()
        fleet.write("key")
        await fleet.all_settled()
        for _ in range(300):
            await asyncio.sleep(20.0)
            assert not _stands_still(fleet)
        await fleet.stop()

    story()


def test_a_relay_whose_tick_never_ends_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hanging(*_: object) -> TickResult:
        await asyncio.Event().wait()
        raise AssertionError

    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(wake=WakeSettings(longest=3600.0))
        fleet.start()
        await fleet.all_settled()
        monkeypatch.setattr(MemoryStore, "tick", hanging)
        fleet.write("key")
        await asyncio.sleep(60.0)
        assert not _stands_still(fleet), "it may still be the database that takes its time"
        await asyncio.sleep(60.0)
        assert _stands_still(fleet)
        await fleet.end()

    story()


@pytest.mark.parametrize("most", [1, 40])
def test_a_relay_that_runs_out_of_memory_by_its_reads_reads_less_after_a_crash(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Guarantee G1, also if relays die before a window is open, so that no event is a crash suspect."""
    routed = MemoryOutbox.routed

    def kill(
        outbox: MemoryOutbox, rows: Sequence[MemoryRow], members: Sequence[Lease]
    ) -> dict[CursorKey, list[OutboxEvent]]:
        if len(rows) > most:
            raise MemoryError
        return routed(outbox, rows, members)

    monkeypatch.setattr(MemoryOutbox, "routed", kill)

    @in_virtual_time
    async def story() -> None:
        fleet = Fleet(declared=[subscription(partitions=2)])
        written = [event.event_id for event in fleet.write(*[f"key {n % 5}" for n in range(200)])]
        settled = asyncio.ensure_future(fleet.all_settled())
        for _ in range(8):
            life = fleet.start().task
            await asyncio.wait({life, settled}, return_when=asyncio.FIRST_COMPLETED)
            if settled.done():
                break
            assert isinstance(life.exception(), MemoryError)
        assert settled.done(), "it dies again and again"
        assert sorted(fleet.arrived()) == sorted(written)
        await fleet.stop()

    story()
