"""Windows in Postgres: settling, looking for new events, opening windows. (`reading.py` reads the open ones.)

This is the heart of Mailboat's promise to lose nothing; ``docs/windows.md`` explains it, ``sql/windows.sql`` has the
statements, and this module keeps them in the only order in which they are right:

1. ``tick`` is one transaction. It settles first, so that a cursor closed by it can be looked at again at once; then it
   takes a snapshot C and reads what became visible since the group's P in one statement; then it writes C down for
   those that have events. Its commit waits for the WAL (``durability``) exactly when a window was opened: everything
   visible in C comes before that commit in the WAL, so whoever survives a crash with this cursor has those events too.
2. Events are handed out only after that commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import AsyncCursor

from mailboat.events import Event
from mailboat.outbox.composed import Compositions, asking, lease_arrays
from mailboat.outbox.link import Link, Row, refuse_other_server
from mailboat.outbox.parking import Parking
from mailboat.outbox.routing import EVENT_COLUMNS
from mailboat.outbox.sqlfiles import statements
from mailboat.outbox.store import (
    Advanced,
    CursorKey,
    Lease,
    Opened,
    Settlement,
    TickResult,
    TipGroup,
    Window,
)

_SQL = statements("windows")

_SYNC_LEVEL = {"Committed": "off", "Flushed": "local", "Replicated": "on"}


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much is read at once. A window beyond ``small_rows`` or ``bytes`` is walked in stretches of ``rows``."""

    small_rows: int = 2000
    rows: int = 4000
    bytes: int = 8 * 1024 * 1024


class Windows:
    """The windows of one outbox, for one relay."""

    def __init__(self, compositions: Compositions, durability: str, limits: ReadLimits, parking: Parking) -> None:
        self._compositions = compositions
        self._sync_level = _SYNC_LEVEL[durability]
        self._limits = limits
        self._parking = parking

    async def tick(self, link: Link, settlements: Sequence[Settlement], tips: Sequence[TipGroup]) -> TickResult:
        """Settle, look, open; see the module's docstring."""
        async with link.transaction() as cursor:
            await cursor.execute(_SQL["guard"])
            refuse_other_server(await cursor.fetchone(), link.server)
            lost = await self._settle(cursor, settlements) if settlements else set()
            opened: list[Opened] = []
            advanced: list[Advanced] = []
            for group in tips:
                for outcome in await self._look(cursor, link, group, lost, merge=len(tips) > 1):
                    (opened if isinstance(outcome, Opened) else advanced).append(outcome)  # type: ignore[arg-type]
            level = self._sync_level if opened else "off"
            if level == "off" and any(s.durable for s in settlements):
                level = "local"
            if level != "off":
                await cursor.execute(_SQL["sync"], {"level": level})
        return TickResult(frozenset(lost), tuple(opened), tuple(advanced))

    async def _settle(self, cursor: AsyncCursor[Row], settlements: Sequence[Settlement]) -> set[CursorKey]:
        windowed = [s for s in settlements if s.upto is not None]
        parked_only = [s for s in settlements if s.upto is None]
        kept: set[CursorKey] = set()
        if windowed:
            await cursor.execute(
                _SQL["settle"],
                {
                    **lease_arrays(s.lease for s in windowed),
                    "uptos": [s.upto for s in windowed],
                    "positions": [s.position for s in windowed],
                    "sequences": [s.sequence for s in windowed],
                    "closes": [s.closes for s in windowed],
                },
            )
            kept.update(CursorKey(*row) for row in await cursor.fetchall())
        if parked_only:
            await cursor.execute(_SQL["fence"], lease_arrays(s.lease for s in parked_only))
            kept.update(CursorKey(*row) for row in await cursor.fetchall())
        for settlement in settlements:
            if settlement.durable and settlement.lease.key in kept:
                await self._parking.apply(cursor, settlement)
        return {s.lease.key for s in settlements} - kept

    async def _look(
        self, cursor: AsyncCursor[Row], link: Link, group: TipGroup, lost: set[CursorKey], *, merge: bool
    ) -> list[Opened | Advanced]:
        members = [lease for lease in group.members if lease.key not in lost]
        limits = {"limit": self._limits.small_rows + 1, "max_bytes": self._limits.bytes}
        rows: list[Row] = []
        while members and not rows:
            # One member asks for all. If it was lost, its silence says nothing about events: the next one asks.
            where = {**asking(members[0]), "done": group.done}
            composed = self._compositions.for_members(members)
            await cursor.execute(composed.tail, {**where, **limits})
            rows = await cursor.fetchall()
            if not rows:
                lost.add(members.pop(0).key)
        if not members:
            return []
        upto: str = rows[0][-1]
        if rows[0][0] is None:
            if not merge:
                return []
            events: Mapping[CursorKey, Sequence[Event]] | None = {}
            window = Window(group.done, upto)
        elif len(rows) > self._limits.small_rows or rows[0][-2]:
            await cursor.execute(self._compositions.span, {**where, **limits})
            row = await cursor.fetchone()
            assert row is not None
            window, events = Window(group.done, *row), None
        else:
            window = Window(group.done, upto)
            hits = [row[: composed.width] for row in rows if row[EVENT_COLUMNS]]
            events = composed.fan_out(hits, frozenset(lease.key for lease in members))
        outcome = await self._open(cursor, link, window, members, events)
        lost.update(m.key for m in members if not any(m in o.members for o in outcome))
        return outcome

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
                **lease_arrays(members),
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
