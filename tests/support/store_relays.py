"""A relay of the conformance suite: a store, its leases, and the steps of a relay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import (
    Cursor,
    CursorGroup,
    CursorKey,
    Lease,
    Measured,
    Opened,
    OutboxStore,
    Settlement,
    Subscription,
    TickResult,
)
from mailboat.store.settings import StoreSettings
from mailboat_spec import EventSubscription
from support.store_backends import SETTINGS, Store, World, joined


@dataclass
class Relay:
    """Relay that claims, polls and settles, and has no state beyond that of a relay."""

    store: Store
    subscriptions: dict[int, Subscription]
    cursors: dict[CursorKey, Cursor] = field(default_factory=dict)
    settled_snapshot: dict[CursorKey, str] = field(default_factory=dict)
    sequence: dict[CursorKey, int] = field(default_factory=dict)

    @classmethod
    async def start(
        cls,
        world: World,
        declared: Sequence[EventSubscription],
        name: str = "relay",
        settings: StoreSettings = SETTINGS,
    ) -> Relay:
        store = await world.open(name, settings)
        relay = cls(store, await store.declare(declared))
        await joined(store)
        return relay

    @property
    def keys(self) -> list[CursorKey]:
        return [CursorKey(n, p) for n, s in self.subscriptions.items() for p in range(s.partitions)]

    def lease(self, key: CursorKey) -> Lease:
        return self.cursors[key].lease

    async def claim(self, keys: Collection[CursorKey] | None = None) -> list[CursorKey]:
        """Claim partitions, by default all, and return the claimed ones."""
        cursors = await self.store.claim(self.keys if keys is None else keys)
        for cursor in cursors:
            key = cursor.lease.key
            self.cursors[key], self.sequence[key] = cursor, cursor.sequence
            self.settled_snapshot.pop(key, None)
            if cursor.window is None:
                self.settled_snapshot[key] = cursor.settled_snapshot
        return sorted(cursor.lease.key for cursor in cursors)

    def groups(self) -> list[CursorGroup]:
        groups: dict[str, list[Lease]] = defaultdict(list)
        for key, settled_snapshot in sorted(self.settled_snapshot.items()):
            groups[settled_snapshot].append(self.lease(key))
        return [CursorGroup(settled_snapshot, tuple(members)) for settled_snapshot, members in groups.items()]

    async def tick(self, *settlements: Settlement) -> TickResult:
        for settlement in settlements:
            if settlement.closes and settlement.window_snapshot is not None:
                self.settled_snapshot[settlement.lease.key] = settlement.window_snapshot
        result = await ticked(self.store, settlements, self.groups())
        self.settled_snapshot.update((lease.key, snapshot) for lease, snapshot in result.advanced.items())
        for opened in result.opened:
            for lease in opened.members:
                self.settled_snapshot.pop(lease.key, None)
        return result

    async def events(self, opened: Opened, after: int = 0) -> dict[CursorKey, list[OutboxEvent]]:
        """Return all events of a window. A large window is read in chunks."""
        if opened.events is not None:
            return {key: list(events) for key, events in opened.events.items()}
        found: dict[CursorKey, list[OutboxEvent]] = defaultdict(list)
        while True:
            chunk = await self.store.read(opened.window, opened.members, after)
            for key, events in chunk.events.items():
                found[key] += events
            if chunk.last:
                return dict(found)
            assert chunk.reached > after
            after = chunk.reached

    async def drain(self) -> dict[CursorKey, list[OutboxEvent]]:
        """Deliver and settle all events, and return them by partition."""
        delivered: dict[CursorKey, list[OutboxEvent]] = defaultdict(list)
        result = await self.tick()
        while not result.quiet:
            closing = []
            for opened in result.opened:
                events = await self.events(opened)
                for lease in opened.members:
                    mine = events.get(lease.key, [])
                    delivered[lease.key] += mine
                    self.sequence[lease.key] += len(mine)
                    position = mine[-1].id if mine else 0
                    window_snapshot, sequence = opened.window.window_snapshot, self.sequence[lease.key]
                    closing.append(Settlement(lease, window_snapshot, position, sequence, closes=True))
            result = await self.tick(*closing)
            assert not result.lost
        return dict(delivered)

    async def drained(self) -> list[OutboxEvent]:
        """Deliver and settle all events, and return them by position."""
        return sorted(event for events in (await self.drain()).values() for event in events)

    async def crash(self) -> None:
        await self.store.close(leave=False)


async def ticked(store: OutboxStore, settlements: Sequence[Settlement], groups: Sequence[CursorGroup]) -> TickResult:
    """Run a tick, and a second one that opens the windows that were too large for the first."""
    first = await store.tick(settlements, groups)
    measured = [
        Measured(window, group.members)
        for group in first.overflowing
        if (window := await store.measure(group)) is not None
    ]
    if not measured:
        return first
    second = await store.tick([], [], measured)
    return TickResult(first.lost | second.lost, first.opened + second.opened, first.advanced)


def write(world: World, *keys: str | None, type: str = "order.placed", **columns: Any) -> list[str]:
    """Commit a transaction with an event per key, and return their ids."""
    writer = world.begin()
    written = [writer.insert(type, key=key, **columns) for key in keys]
    writer.commit()
    return written
