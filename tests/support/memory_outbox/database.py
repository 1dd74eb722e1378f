"""The database in memory that several relays share: rows, and transactions with the visibility rules of Postgres.

The code is deliberately simple: a window is found by testing every row against both snapshots.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, Lease, Subscription
from mailboat.store.queries import fan_out
from mailboat_spec import EventSubscription
from support.memory_outbox.rows import CursorRow, DeadRow, MemoryRow, ParkedRow, Snapshot, slot_of, timestamp


@dataclass(slots=True)
class Subscribed:
    subscription: Subscription
    resource: EventSubscription


@dataclass(slots=True)
class MemoryRelay:
    incarnation: str
    serves: frozenset[int]
    beat_at: datetime
    ttl: float
    locked: bool = True


class Transaction:
    """Transaction of a writer. Its id is assigned early on request, otherwise by the first insert, as in Postgres."""

    def __init__(self, outbox: MemoryOutbox, *, early: bool) -> None:
        self._outbox = outbox
        self._xid: int | None = outbox.take_xid() if early else None
        self._rings: list[asyncio.Event] = []

    def insert(
        self, type: str, *, key: str | None = None, payload: bytes | None = b"{}", **columns: Any
    ) -> OutboxEvent:
        """Add an event. The relays to notify are determined now, as by the trigger."""
        if self._xid is None:
            self._xid = self._outbox.take_xid()
        self._rings += self._outbox.bells.values()
        return self._outbox.add(self._xid, type, key, payload, **columns)

    def commit(self) -> None:
        self._outbox.end(self._xid, keep=True)
        for bell in self._rings:
            bell.set()

    def rollback(self) -> None:
        self._outbox.end(self._xid, keep=False)


class MemoryOutbox:
    """The database. ``now`` is its clock."""

    def __init__(
        self,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        latency: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.now = now
        self.latency = latency
        self.away: str | None = None
        self.rows: list[MemoryRow] = []
        self.subscriptions: dict[int, Subscribed] = {}
        self.cursors: dict[CursorKey, CursorRow] = {}
        self.parked: dict[int, ParkedRow] = {}
        self.dead: list[DeadRow] = []
        self.relays: dict[str, MemoryRelay] = {}
        self.bells: dict[str, asyncio.Event] = {}
        self._open: set[int] = set()
        self._next_xid = 3
        self._counts: Counter[str] = Counter()

    # -- writers -----------------------------------------------------------------------------------------------------

    def begin(self, *, early: bool = False) -> Transaction:
        return Transaction(self, early=early)

    def take_xid(self) -> int:
        xid, self._next_xid = self._next_xid, self._next_xid + 1
        self._open.add(xid)
        return xid

    def add(self, xid: int, type: str, key: str | None, payload: bytes | None, **columns: Any) -> OutboxEvent:
        number, now = self.number("event"), self.now()
        event = OutboxEvent(
            number,
            columns.get("event_id") or f"00000000-0000-4000-8000-{number:012d}",
            type,
            columns.get("aggregate_type"),
            columns.get("aggregate_id"),
            key,
            payload,
            "application/json",
            columns.get("headers"),
            "{" + ",".join(columns.get("tags", ())) + "}",
            None,
            timestamp(now),
            slot_of(key, number),
        )
        self.rows.append(MemoryRow(event, xid, frozenset(columns.get("tags", ())), now))
        return event

    def end(self, xid: int | None, *, keep: bool) -> None:
        self._open.discard(xid or 0)
        if not keep:
            self.rows = [row for row in self.rows if row.xid != xid]

    # -- stores ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(self._next_xid, frozenset(self._open))

    def between(self, settled_snapshot: str, window_snapshot: str) -> list[MemoryRow]:
        """Return the rows that became visible between two snapshots, by id: the definition of a window."""
        earlier, later = Snapshot.parse(settled_snapshot), Snapshot.parse(window_snapshot)
        return [row for row in self.rows if later.sees(row.xid) and not earlier.sees(row.xid)]

    def number(self, what: str) -> int:
        self._counts[what] += 1
        return self._counts[what]

    def lease_holds(self, lease: Lease) -> bool:
        cursor = self.cursors.get(lease.key)
        return cursor is not None and cursor.epoch == lease.epoch

    def routed(self, rows: Iterable[MemoryRow], members: Collection[Lease]) -> dict[CursorKey, list[OutboxEvent]]:
        numbers = sorted({lease.key.subscription for lease in members})
        wanting = {number: self.subscriptions[number] for number in numbers}
        pairs = ((row.event, [n for n, s in wanting.items() if row.wanted_by(s.resource.spec)]) for row in rows)
        subscriptions = {number: found.subscription for number, found in wanting.items()}
        return fan_out(pairs, subscriptions, frozenset(lease.key for lease in members))

    def queue(self, key: CursorKey, of: str | None) -> list[ParkedRow]:
        """Return the parked events of a key in sending order."""
        mine = (row for row in self.parked.values() if row.cursor == key and row.event.key == of and of is not None)
        return sorted(mine, key=ParkedRow.order)

    def line_up(self, key: CursorKey, keys: Collection[str]) -> None:
        """Give only the first parked event of each key a time for its next attempt."""
        for of in keys:
            for place, row in enumerate(self.queue(key, of)):
                if place > 0:
                    row.next_attempt_at = None
                elif row.next_attempt_at is None and not row.blocked:
                    row.next_attempt_at = self.now()

    def set_loose(self, key: CursorKey) -> None:
        """Make all waiting events due, for a subscription without ordering."""
        for row in self.parked.values():
            if row.cursor == key and row.next_attempt_at is None and not row.blocked:
                row.next_attempt_at = self.now()

    # -- commands ----------------------------------------------------------------------------------------------------

    def pause(self, number: int, paused: bool) -> None:
        found = self.subscriptions[number]
        found.subscription = replace(found.subscription, paused=paused)

    def assign(self, number: int, owners: Mapping[int, str]) -> None:
        for partition, relay in owners.items():
            self.cursors[CursorKey(number, partition)].assigned_to = relay

    def replay(self, chosen: Collection[DeadRow]) -> None:
        """Move dead letters to the head of the queue of their key, in the order of ids. One head per key is due."""
        for dead in sorted(chosen, key=lambda dead: dead.event.id):
            self.dead.remove(dead)
            row = ParkedRow(self.number("parked"), dead.cursor, dead.event, dead.sequence, 0, rank=0, replay=True)
            self.parked[row.ordinal] = row
            if dead.event.key is None:
                row.next_attempt_at = self.now()
            else:
                self.line_up(dead.cursor, [dead.event.key])
