"""Random interleavings of writers, ticks, settlements and crashes: no event is lost, doubled or invented (G1, G3).

A state machine runs several writers and one relay at random, and keeps its own record. The relay is as simple as
possible: it takes the windows that a tick opens, settles some of their events, and sometimes dies.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import Cursor, CursorGroup, CursorKey, Lease, Opened, Settlement, Window
from mailboat.store.settings import ReadLimits
from support.store_backends import SETTINGS, MemoryWorld, Store, World, Writer, joined, subscription
from support.store_relays import ticked

WRITERS = st.integers(0, 3)
DECLARED = [
    subscription("all", partitions=2),
    subscription("some", partitions=3, filter={"eventTypes": ["b.*"]}),
    subscription("tagged", partitions=1, filter={"tags": {"noneOf": ["secret"]}}),
]
LIMITS = [
    ReadLimits(small_rows=3, rows=2, bytes=1000),
    ReadLimits(bytes=40),
    ReadLimits(small_rows=1, rows=3, bytes=30),
]


@dataclass
class Hand:
    """An open window of the relay, with the events that are not settled yet."""

    window: Window
    left: list[OutboxEvent]


class Interleavings(RuleBasedStateMachine):
    world: World
    limits: ReadLimits

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.world.reset()
        self.writers: dict[int, Writer] = {}
        self.written: dict[int, list[tuple[str, str, bool]]] = defaultdict(list)
        self.committed: list[tuple[str, str, bool]] = []
        self.leases: dict[CursorKey, Lease] = {}
        self.settled_snapshot: dict[CursorKey, str] = {}
        self.hands: dict[CursorKey, Hand] = {}
        self.sequence: dict[CursorKey, int] = defaultdict(int)
        self.settled: dict[CursorKey, list[str]] = defaultdict(list)
        self.store: Store = self.loop.run(self._born())

    async def _born(self) -> Store:
        store = await self.world.open("relay", replace(SETTINGS, limits=self.limits))
        self.subscriptions = await store.declare(DECLARED)
        await joined(store)
        keys = [CursorKey(n, p) for n, s in self.subscriptions.items() for p in range(s.partitions)]
        cursors = await store.claim(keys)
        assert {cursor.lease.key for cursor in cursors} == set(keys)
        self.leases = {cursor.lease.key: cursor.lease for cursor in cursors}
        await self._take_over(store, cursors)
        return store

    async def _take_over(self, store: Store, cursors: list[Cursor]) -> None:
        """Check that a new owner finds the state of the last one: the same events, order and sequences."""
        shared: dict[Window, list[Cursor]] = defaultdict(list)
        for cursor in cursors:
            assert cursor.sequence == self.sequence[cursor.lease.key]
            if cursor.window is None:
                assert cursor.lease.key not in self.hands
                self.settled_snapshot[cursor.lease.key] = cursor.settled_snapshot
            else:
                shared[cursor.window].append(cursor)
        for window, members in shared.items():
            after = min(cursor.position for cursor in members)
            found = await self._read(store, window, [cursor.lease for cursor in members], after)
            for cursor in members:
                key = cursor.lease.key
                left = [event for event in found[key] if event.id > cursor.position]
                assert left == self.hands[key].left
                assert self.hands[key].window == window

    async def _read(
        self, store: Store, window: Window, members: list[Lease], after: int = 0
    ) -> dict[CursorKey, list[OutboxEvent]]:
        found: dict[CursorKey, list[OutboxEvent]] = defaultdict(list)
        while True:
            chunk = await store.read(window, members, after)
            assert chunk.last or chunk.reached > after, "a stretch that is not the last must get further"
            for key, events in chunk.events.items():
                found[key] += events
            if chunk.last:
                return found
            after = chunk.reached

    # -- writers -----------------------------------------------------------------------------------------------------

    @rule(number=WRITERS, early=st.booleans())
    def begin(self, number: int, early: bool) -> None:
        if number not in self.writers:
            self.writers[number] = self.world.begin(early=early)

    @rule(
        number=WRITERS,
        type=st.sampled_from(["a.x", "b.x", "b.y"]),
        key=st.sampled_from([None, "k1", "k2", "k3", "k4"]),
        size=st.sampled_from([None, 0, 3, 25]),
        secret=st.booleans(),
    )
    def insert(self, number: int, type: str, key: str | None, size: int | None, secret: bool) -> None:
        writer = self.writers.get(number)
        if writer is None:
            writer = self.writers[number] = self.world.begin()
        payload = None if size is None else b"x" * size
        event_id = writer.insert(type, key=key, payload=payload, tags=["secret"] if secret else [])
        self.written[number].append((event_id, type, secret))

    @rule(number=WRITERS)
    def commit(self, number: int) -> None:
        if number in self.writers:
            self.writers.pop(number).commit()
            self.committed += self.written.pop(number, [])

    @rule(number=WRITERS)
    def rollback(self, number: int) -> None:
        if number in self.writers:
            self.writers.pop(number).rollback()
            self.written.pop(number, None)

    # -- the relay ---------------------------------------------------------------------------------------------------

    @rule()
    def look(self) -> None:
        self.loop.run(self._tick([]))

    @rule(data=st.data())
    @precondition(lambda self: self.hands)
    def settle(self, data: st.DataObject) -> None:
        """Settle some events of several open windows in one tick, which also polls."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.hands)), unique=True, min_size=1))
        self.loop.run(self._tick([(k, data.draw(st.integers(1, 1 + len(self.hands[k].left)))) for k in keys]))

    @rule(orderly=st.booleans())
    def begin_anew(self, orderly: bool) -> None:
        self.loop.run(self._begin_anew(orderly))

    async def _begin_anew(self, orderly: bool) -> None:
        if orderly:
            await self.store.release(list(self.leases.values()))
        await self.store.close(leave=orderly)
        self.store = await self._born()

    async def _tick(self, progress: list[tuple[CursorKey, int]]) -> bool:
        settlements = [self._settlement(key, count) for key, count in progress]
        members: dict[str, list[Lease]] = defaultdict(list)
        for key, settled_snapshot in self.settled_snapshot.items():
            members[settled_snapshot].append(self.leases[key])
        groups = [CursorGroup(settled_snapshot, tuple(leases)) for settled_snapshot, leases in members.items()]
        result = await ticked(self.store, settlements, groups)
        assert not result.lost
        for lease, settled_snapshot in result.advanced.items():
            self.settled_snapshot[lease.key] = settled_snapshot
        for opened in result.opened:
            await self._open(opened)
        return result.quiet and not settlements

    def _settlement(self, key: CursorKey, count: int) -> Settlement:
        hand = self.hands[key]
        settled, hand.left = hand.left[:count], hand.left[count:]
        self.sequence[key] += len(settled)
        self.settled[key] += [event.event_id for event in settled]
        closes = count > len(settled)
        if closes:
            del self.hands[key]
            self.settled_snapshot[key] = hand.window.window_snapshot
        position = settled[-1].id if settled else 0
        return Settlement(self.leases[key], hand.window.window_snapshot, position, self.sequence[key], closes)

    async def _open(self, opened: Opened) -> None:
        events = opened.events
        if events is None:
            assert opened.window.lowest is not None
            events = await self._read(self.store, opened.window, list(opened.members))
        committed = {event_id for event_id, _, _ in self.committed}
        for lease in opened.members:
            mine = list(events.get(lease.key, ()))
            assert [event.id for event in mine] == sorted({event.id for event in mine})
            assert {event.event_id for event in mine} <= committed, "an event that was never committed"
            self.hands[lease.key] = Hand(opened.window, mine)
            self.settled_snapshot.pop(lease.key, None)

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            for writer in self.writers.values():
                writer.rollback()
            self.loop.run(self.store.close(leave=True))
            self.loop.close()

    def _finish(self) -> None:
        """Commit and settle everything, then compare the delivered events with the committed ones."""
        for number in list(self.writers):
            self.commit(number)
        while not self.loop.run(self._tick([(key, 1 + len(hand.left)) for key, hand in self.hands.items()])):
            pass
        for number, found in self.subscriptions.items():
            delivered = [e for key, events in self.settled.items() if key.subscription == number for e in events]
            expected = {
                event_id
                for event_id, type, secret in self.committed
                if (found.name != "shop/some" or type.startswith("b.")) and not (found.name == "shop/tagged" and secret)
            }
            assert len(delivered) == len(set(delivered)), "delivered twice without a crash in between"
            assert set(delivered) == expected


@pytest.mark.parametrize("limits", LIMITS, ids=["by rows", "by bytes", "both"])
def test_no_interleaving_loses_or_doubles_an_event(any_world: World, limits: ReadLimits) -> None:
    machine = type("Machine", (Interleavings,), {"world": any_world, "limits": limits})
    quick = isinstance(any_world, MemoryWorld)
    effort = settings(
        max_examples=60 if quick else 6,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=set(Phase) if quick else {Phase.generate},
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=effort)
