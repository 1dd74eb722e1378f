"""Windows in Postgres: settling, looking for new events, and reading open windows.

This is the heart of Mailboat's promise to lose nothing; ``docs/windows.md`` explains it, ``sql/windows.sql`` has the
statements, and this module keeps them in the only order in which they are right:

1. ``tick`` is one transaction. It settles first, so that a cursor closed by it can be looked at again at once; then it
   takes a snapshot C and reads what became visible since the group's P in one statement; then it writes C down for
   those that have events. Its commit waits for the WAL (``durability``) exactly when a window was opened: everything
   visible in C comes before that commit in the WAL, so whoever survives a crash with this cursor has those events too.
2. Events are handed out only after that commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncCursor, sql

from mailboat.errors import DatabaseUnavailable
from mailboat.events import Event
from mailboat.outbox.filters import Predicate, any_of, routes
from mailboat.outbox.layout import COLUMNS, Layout, scanned
from mailboat.outbox.link import Link, Row
from mailboat.outbox.parking import Parking
from mailboat.outbox.routing import EVENT_COLUMNS, fan_out, fan_out_single
from mailboat.outbox.sqlfiles import statements
from mailboat.outbox.store import (
    Advanced,
    Chunk,
    CursorKey,
    Lease,
    Opened,
    Settlement,
    Subscription,
    TickResult,
    TipGroup,
    Window,
)

_SQL = statements("windows")

_UNDONE = sql.SQL("not pg_visible_in_snapshot(e.xid, (select done from w))")
_UNDONE_BEFORE = sql.SQL("not mailboat.settled_before((select debts from w), e.slot, e.xid, e.id)")

_SYNC_LEVEL = {"Committed": "off", "Flushed": "local", "Replicated": "on"}


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much is read at once. A window beyond ``small_rows`` or ``bytes`` is walked in stretches of ``rows``."""

    small_rows: int = 2000
    rows: int = 4000
    bytes: int = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Route:
    """A subscription and the predicate of its filter."""

    subscription: Subscription
    wanted: Predicate


@dataclass(slots=True)
class _Composed:
    """The statements for one set of subscriptions; composed once, prepared by the server under one name."""

    tail: sql.Composed
    small_window: sql.Composed
    large_window: sql.Composed
    indebted_window: sql.Composed


class Windows:
    """The windows of one outbox, for one relay."""

    def __init__(self, layout: Layout, durability: str, limits: ReadLimits, parking: Parking) -> None:
        self._layout = layout
        self._sync_level = _SYNC_LEVEL[durability]
        self._limits = limits
        self._parking = parking
        self._routes: Mapping[int, Route] = {}
        self._composed: dict[tuple[int, ...], _Composed] = {}
        self._span = sql.SQL(_SQL["span"]).format(outbox=layout.outbox)

    def route(self, routes_by_number: Mapping[int, Route]) -> None:
        """Which subscriptions there are, from now on."""
        self._routes = routes_by_number
        self._composed.clear()

    async def tick(self, link: Link, settlements: Sequence[Settlement], tips: Sequence[TipGroup]) -> TickResult:
        """Settle, look, open; see the module's docstring."""
        async with link.transaction() as cursor:
            await self._guard(cursor, link)
            lost = await self._settle(cursor, settlements) if settlements else frozenset()
            opened: list[Opened] = []
            advanced: list[Advanced] = []
            for group in tips:
                for outcome in await self._look(cursor, link, group, lost, merge=len(tips) > 1):
                    (opened if isinstance(outcome, Opened) else advanced).append(outcome)  # type: ignore[arg-type]
            if opened or any(s.durable for s in settlements):
                level = self._sync_level if opened and self._sync_level != "off" else "local"
                await cursor.execute(_SQL["sync"], {"level": level})
        return TickResult(lost, tuple(opened), tuple(advanced))

    async def _guard(self, cursor: AsyncCursor[Row], link: Link) -> None:
        row = await (await cursor.execute(_SQL["guard"])).fetchone()
        assert row is not None
        *_, in_recovery, timeline = row
        if in_recovery or int(timeline, 16) != link.server.timeline:
            raise DatabaseUnavailable("another server answers now (a failover): what was in memory is dropped")

    async def _settle(self, cursor: AsyncCursor[Row], settlements: Sequence[Settlement]) -> frozenset[CursorKey]:
        windowed = [s for s in settlements if s.upto is not None]
        parked_only = [s for s in settlements if s.upto is None]
        kept: set[CursorKey] = set()
        if windowed:
            await cursor.execute(
                _SQL["settle"],
                {
                    **_lease_arrays(s.lease for s in windowed),
                    "uptos": [s.upto for s in windowed],
                    "positions": [s.position for s in windowed],
                    "sequences": [s.sequence for s in windowed],
                    "closes": [s.closes for s in windowed],
                },
            )
            kept.update(CursorKey(*row) for row in await cursor.fetchall())
        if parked_only:
            await cursor.execute(_SQL["fence"], _lease_arrays(s.lease for s in parked_only))
            kept.update(CursorKey(*row) for row in await cursor.fetchall())
        for settlement in settlements:
            if settlement.durable and settlement.lease.key in kept:
                await self._parking.apply(cursor, settlement)
        return frozenset(s.lease.key for s in settlements) - kept

    async def _look(
        self, cursor: AsyncCursor[Row], link: Link, group: TipGroup, lost: Collection[CursorKey], *, merge: bool
    ) -> list[Opened | Advanced]:
        members = tuple(lease for lease in group.members if lease.key not in lost)
        if not members:
            return []
        asking = _one(members[0])
        numbers = tuple(sorted({lease.key.subscription for lease in members}))
        await cursor.execute(
            self._statements(numbers).tail,
            {**asking, "limit": self._limits.small_rows + 1, "max_bytes": self._limits.bytes},
        )
        rows = await cursor.fetchall()
        upto: str = rows[0][-1]
        if rows[0][0] is None:
            if not merge:
                return []
            events: Mapping[CursorKey, Sequence[Event]] | None = {}
            window = Window(group.done, upto)
        elif len(rows) > self._limits.small_rows or rows[0][-2]:
            await cursor.execute(self._span, asking)
            row = await cursor.fetchone()
            assert row is not None
            window, events = Window(group.done, *row), None
        else:
            window = Window(group.done, upto)
            hits = [row for row in rows if row[EVENT_COLUMNS]]
            events = self._fan_out(hits, numbers, frozenset(lease.key for lease in members))
        return await self._open(cursor, link, window, members, events)

    async def _open(
        self,
        cursor: AsyncCursor[Row],
        link: Link,
        window: Window,
        members: Sequence[Lease],
        events: Mapping[CursorKey, Sequence[Event]] | None,
    ) -> list[Opened | Advanced]:
        has_events = [events is None or lease.key in events for lease in members]
        await cursor.execute(
            _SQL["open"],
            {
                **_lease_arrays(members),
                "has_events": has_events,
                "done": window.done,
                "upto": window.upto,
                "lowest": window.lowest,
                "highest": window.highest,
                "timeline": link.server.timeline,
            },
        )
        kept = {CursorKey(*row) for row in await cursor.fetchall()}
        opened = tuple(m for m, has in zip(members, has_events, strict=True) if has and m.key in kept)
        moved = tuple(m for m, has in zip(members, has_events, strict=True) if not has and m.key in kept)
        outcome: list[Opened | Advanced] = []
        if opened:
            outcome.append(Opened(window, opened, events))
        if moved:
            outcome.append(Advanced(window.upto, moved))
        return outcome

    async def read(self, link: Link, window: Window, members: Sequence[Lease], after: int) -> Chunk:
        """The next stretch of an open window. A lease that was lost reads as the end; settling will say so."""
        numbers = tuple(sorted({lease.key.subscription for lease in members}))
        keys = frozenset(lease.key for lease in members)
        asking = {**_one(members[0]), "upto": window.upto, "after": after}
        async with link.transaction() as cursor:
            await self._guard(cursor, link)
            if window.highest is None:
                await cursor.execute(self._statements(numbers).small_window, asking)
                rows = await cursor.fetchall()
                return Chunk(self._fan_out(rows, numbers, keys), rows[-1][0] if rows else after, last=True)
            limits = {"limit": self._limits.rows, "max_bytes": self._limits.bytes}
            composed = self._statements(numbers)
            await cursor.execute(
                composed.indebted_window if window.indebted else composed.large_window, {**asking, **limits}
            )
            rows = await cursor.fetchall()
        reached, looked_at = rows[0][-2:]
        last = looked_at < self._limits.rows
        if rows[0][0] is None:
            return Chunk({}, reached if reached is not None else after, last)
        if rows[-1][-3] is not None and rows[-1][-3] > self._limits.bytes and rows[-1][0] != reached:
            reached, last = rows[-1][0], False
        return Chunk(self._fan_out(rows, numbers, keys), reached, last)

    def _fan_out(
        self, rows: Iterable[Row], numbers: tuple[int, ...], members: frozenset[CursorKey]
    ) -> dict[CursorKey, list[Event]]:
        if len(numbers) == 1:
            events = (row[:EVENT_COLUMNS] for row in rows)
            return fan_out_single(events, self._routes[numbers[0]].subscription, members)
        subscriptions = {number: self._routes[number].subscription for number in numbers}
        pairs = ((row[:EVENT_COLUMNS], row[EVENT_COLUMNS]) for row in rows)
        return fan_out(pairs, subscriptions, members)

    def _statements(self, numbers: tuple[int, ...]) -> _Composed:
        if numbers not in self._composed:
            wanted = {number: self._routes[number].wanted for number in numbers}
            parts: dict[str, Any] = {
                "outbox": self._layout.outbox,
                "stored": self._layout.stored,
                "columns": COLUMNS,
                "scanned": scanned(single=len(numbers) == 1),
                "routes": routes(wanted),
                "wanted": any_of(wanted),
            }
            self._composed[numbers] = _Composed(
                sql.SQL(_SQL["tail"]).format(**parts),
                sql.SQL(_SQL["small_window"]).format(**parts),
                sql.SQL(_SQL["large_window"]).format(**parts, undone=_UNDONE),
                sql.SQL(_SQL["large_window"]).format(**parts, undone=_UNDONE_BEFORE),
            )
        return self._composed[numbers]


def _one(lease: Lease) -> dict[str, Any]:
    return {"subscription": lease.key.subscription, "partition": lease.key.partition, "epoch": lease.epoch}


def _lease_arrays(leases: Iterable[Lease]) -> dict[str, list[Any]]:
    arrays: dict[str, list[Any]] = defaultdict(list)
    for (subscription, partition), epoch in leases:
        arrays["subscriptions"].append(subscription)
        arrays["partitions"].append(partition)
        arrays["epochs"].append(epoch)
    return arrays
