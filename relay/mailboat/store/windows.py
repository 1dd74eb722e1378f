"""Windows in Postgres: settle, poll for new events, open windows. (`window_reads.py` reads open windows.)

The no-loss guarantee rests on this module. ``docs/windows.md`` explains it, ``store/sql/windows.sql`` has the
statements, and this module sends them in the only correct order:

1. ``tick`` polls first. One statement per group takes a snapshot C and reads the events that became visible since the
   group's P. A cursor whose window this tick closes is polled too: its P is the end of that window. Then the tick
   settles, and stores C for the members that have events. That commit waits for the WAL (``durability``). Everything
   visible in C precedes it in the WAL, so a server that recovers this cursor has those events too.
2. Events are returned only after that commit.
3. A window too large for one read is measured first, on another connection: measuring may take minutes, and the
   settlements of all partitions share the tick. A later tick opens it with the C of the measurement, which also
   precedes the commit.

The statements of a tick are a pipeline with at most two round trips, each of them a transaction: poll, then settle and
open. No lock is needed between the two: the writes check the epoch. A settlement that parks events, and every tick
behind a pooler, has one transaction for all.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

from psycopg import Cursor, sql

from mailboat.errors import DatabaseUnavailable
from mailboat.model import OutboxEvent
from mailboat.store import parked_rows
from mailboat.store.connection import Pipeline, PostgresConnection, Row, refuse_other_server
from mailboat.store.outbox_store import CursorGroup, CursorKey, Lease, Measured, Opened, Settlement, TickResult, Window
from mailboat.store.queries import QueryCache, TailKind
from mailboat.store.settings import StoreSettings
from mailboat.store.sql import statements

_SQL = statements("windows")

STORE_EVERY: Final = 2.0
"""Seconds between two writes of the progress of idle cursors. A cursor without events is not written per tick."""

MOST_UNCHECKED: Final = 7
"""Ticks in a row that check for strays (events in time partitions that a poll leaves out) only if they find events. A
relay that settles without a break still finds the events of a new day."""

_STRAY: Final = -5
"""Column of a poll that is true if the poll left out a time partition with rows."""


class Windows:
    def __init__(self, settings: StoreSettings, query_cache: QueryCache) -> None:
        self._layout = settings.layout
        self._sync_level = settings.sync_level
        self._limits = settings.limits
        self._query_cache = query_cache
        self._unwritten: dict[Lease, str] = {}
        """``settled_snapshot`` of closed cursors that is stored later (see ``STORE_EVERY``)."""
        self._stored_at = time.monotonic()
        self._occupied: _OccupiedPartitions | None = None
        """None: a poll reads the whole table."""
        self._partitions_loaded = False
        self._unchecked = 0
        """Ticks since the last one that checked for strays in any case."""

    async def tick(
        self,
        link: PostgresConnection,
        settlements: Sequence[Settlement],
        groups: Sequence[CursorGroup],
        measured: Sequence[Measured],
    ) -> TickResult:
        stores = link.server.pooled or time.monotonic() - self._stored_at >= STORE_EVERY
        together = link.server.pooled or any(settlement.durable for settlement in settlements)
        lost, settled, windows, overflowing = await link.pipeline(
            lambda pipeline: self._tick(pipeline, settlements, groups, measured, stores=stores),
            one_transaction=together,
        )
        if stores:
            self._unwritten.clear()
            self._stored_at = time.monotonic()
        lost |= {settlement.lease.key for settlement in settlements} - settled()
        opened: list[Opened] = []
        for found in windows:
            lost |= {lease.key for lease in found.with_events} - settled()
            if stored := tuple(lease for lease in found.with_events if lease.key in settled()):
                opened.append(Opened(found.window, stored, found.events))
        advanced = {lease: found.window.window_snapshot for found in windows for lease in found.without_events}
        return TickResult(frozenset(lost), tuple(opened), advanced, tuple(overflowing))

    async def store_unwritten(self, link: PostgresConnection) -> None:
        """Store the progress of idle cursors, so that the next owner does not read the same events again."""
        if self._unwritten:
            await link.pipeline(self._store)
            self._unwritten.clear()

    def _tick(
        self,
        pipeline: Pipeline,
        settlements: Sequence[Settlement],
        groups: Sequence[CursorGroup],
        measured: Sequence[Measured],
        *,
        stores: bool,
    ) -> tuple[set[CursorKey], Callable[[], set[CursorKey]], list[_Found], list[CursorGroup]]:
        if not self._partitions_loaded:
            self._load_partitions(pipeline)
        guard = pipeline.send(_SQL["guard"]) if pipeline.server.pooled else None
        # A tick that settles leaves the check for strays to a later one. With several groups, a snapshot may move.
        checks = not settlements or len(groups) > 1 or self._unchecked == MOST_UNCHECKED
        self._unchecked = 0 if checks else self._unchecked + 1
        cursors = [self._poll(pipeline, group, checks=checks) for group in groups]
        if cursors or guard is not None:
            pipeline.wait()
        if guard is not None:
            refuse_other_server(guard.fetchone(), pipeline.server)
        lost: set[CursorKey] = set()
        polled = [self._next_window(pipeline, group, tail, lost) for group, tail in zip(groups, cursors, strict=True)]
        # Without new events write nothing, unless a common ``settled_snapshot`` merges several groups.
        windows = [found for found in polled if isinstance(found, _Found) and (found.any_visible or len(groups) > 1)]
        windows += [_Found(each.window, None, each.members) for each in measured]
        settled = self._settle_and_open(pipeline, settlements, windows)
        durable = [settlement for settlement in settlements if settlement.durable]
        if durable:
            pipeline.wait()
            for settlement in durable:
                if settlement.lease.key in settled():
                    parked_rows.apply(pipeline, settlement)
        for found in windows:
            for lease in found.with_events:
                self._unwritten.pop(lease, None)
            self._unwritten |= dict.fromkeys(found.without_events, found.window.window_snapshot)
        stored = stores and self._store(pipeline)
        level = self._sync_level if any(found.with_events for found in windows) else "off"
        if durable:
            pipeline.send(_SQL["sync"], {"level": "local" if level == "off" else level})
        elif stored and level == "off":
            pipeline.send(_SQL["sync"], {"level": "off"})
        return lost, settled, windows, [overflow for overflow in polled if isinstance(overflow, CursorGroup)]

    def _settle_and_open(
        self, pipeline: Pipeline, settlements: Sequence[Settlement], windows: Sequence[_Found]
    ) -> Callable[[], set[CursorKey]]:
        """Settle, and open the windows, with one update of each cursor.

        The result, to be called after a wait, returns the cursors that were updated or, for settlements of parked
        events only, locked.
        """
        windowed = [s for s in settlements if s.window_snapshot is not None]
        parked_only = [s for s in settlements if s.window_snapshot is None]
        next_windows = {lease: found.window for found in windows for lease in found.with_events}
        updates = [_settling(each, next_windows.pop(each.lease, None)) for each in windowed]
        updates += [
            _Update(lease.epoch, None, each.settled_snapshot, each.window_snapshot, each.lowest, each.highest)
            for lease, each in next_windows.items()
        ]
        answers = []
        if updates:
            opens = any(update.next_snapshot is not None for update in updates)
            columns = zip(_Update._fields, zip(*updates, strict=True), strict=True)
            arrays = {f"{name}s": list(values) for name, values in columns}
            level, server = self._sync_level if opens else "off", pipeline.server
            options = {"timeline": server.timeline, "pooled": server.pooled, "level": level}
            answers.append(pipeline.send(_SQL["settle"], arrays | options))
        elif parked_only:
            pipeline.send(_SQL["sync"], {"level": "off"})
        if parked_only:
            answers.append(pipeline.send(_SQL["fence"], {"epochs": [s.lease.epoch for s in parked_only]}))
        flagged = [s for s in settlements if s.in_flight is not None]
        if flagged:
            in_flight = {"epochs": [s.lease.epoch for s in flagged], "in_flight": [s.in_flight for s in flagged]}
            pipeline.send(_SQL["in_flight"], in_flight)
        return cache(lambda: {CursorKey(*row[:2]) for answer in answers for row in answer.fetchall()})

    def _poll(self, pipeline: Pipeline, group: CursorGroup, *, checks: bool = True) -> Cursor[Row]:
        """Send the query for events visible since ``settled_snapshot``, with the lease of the first member for all."""
        occupied = self._occupied
        composed = self._query_cache.for_members(group.members)
        late = not group.settled_snapshot.endswith(":")
        tail = composed.tail(TailKind(late, None if occupied is None else occupied.before))
        bounds = {"limit": 1 if group.cautious else self._limits.small_rows + 1, "max_bytes": self._limits.bytes}
        where = {
            "epoch": group.members[0].epoch,
            **composed.own(group.members),
            "settled_snapshot": group.settled_snapshot,
            "pooled": pipeline.server.pooled,
        }
        pruning = {"outbox": occupied.outbox, "read": occupied.read, "checks": checks} if occupied is not None else {}
        return pipeline.send(tail, where | bounds | pruning)

    def _load_partitions(self, pipeline: Pipeline) -> None:
        statement = sql.SQL(_SQL["time_partitions"]).format(outbox=self._layout.regclass)
        found = pipeline.send(statement, {"created_at": self._layout.columns.get("created_at", "created_at")})
        pipeline.wait()
        row = found.fetchone()
        self._occupied = None if row is None else _OccupiedPartitions(*row)
        self._partitions_loaded = True

    def _store(self, pipeline: Pipeline) -> bool:
        """Store the progress of idle cursors and return True if there was any. A lost lease is skipped; the next
        heartbeat reports it."""
        by_done: dict[str, list[Lease]] = defaultdict(list)
        for lease, settled_snapshot in self._unwritten.items():
            by_done[settled_snapshot].append(lease)
        for settled_snapshot, leases in by_done.items():
            where = {"epochs": [lease.epoch for lease in leases], "timeline": pipeline.server.timeline}
            pipeline.send(_SQL["advance"], {**where, "settled_snapshot": settled_snapshot})
        return bool(by_done)

    def _next_window(
        self, pipeline: Pipeline, group: CursorGroup, tail: Cursor[Row], lost: set[CursorKey]
    ) -> _Found | CursorGroup | None:
        """Return the next window of a group, the group itself if that is too large, or None if all leases are lost."""
        queried = members = list(group.members)
        rows = tail.fetchall()
        while not rows or queried[0].key in lost or rows[0][_STRAY]:
            if not rows or queried[0].key in lost:
                # An empty result for a lost lease does not mean that there are no events: retry with the next member.
                lost.add(queried[0].key)
                queried = members = [lease for lease in members if lease.key not in lost]
                if not members:
                    return None
            else:
                self._load_partitions(pipeline)
            tail = self._poll(pipeline, replace(group, members=tuple(queried)))
            pipeline.wait()
            rows = tail.fetchall()
        members = [lease for lease in members if lease.key not in lost]
        found, too_much, window_snapshot, process = rows[0][-4:]
        if process != pipeline.server.process and not pipeline.server.pooled:
            raise DatabaseUnavailable(
                "the connection changed its server process: there is a transaction pooler in between. Set"
                " spec.database.pooler: Transaction on the OutboxRelay."
            )
        if too_much:
            return replace(group, members=tuple(members))
        composed = self._query_cache.for_members(queried)
        matching = [row[: composed.width] for row in rows if row[0] is not None]
        events = composed.fan_out(matching, frozenset(lease.key for lease in members))
        with_events = tuple(lease for lease in members if lease.key in events)
        without_events = tuple(lease for lease in members if lease.key not in events)
        window = Window(group.settled_snapshot, window_snapshot)
        return _Found(window, events, with_events, without_events, any_visible=found > 0)


class _OccupiedPartitions(NamedTuple):
    """The time partitions that a poll reads: up to the last one with rows.

    Time partitions are made 30 days ahead (G10), and an index scan of an empty one costs as much as of one with rows.
    No clock decides which ones a poll leaves out: it checks in the same statement that their files are still empty
    (``stray``). If one is not, the poll is void and repeated with the current list. A poll that finds no events moves
    no snapshot, so it may leave the check to a later one.
    """

    outbox: int
    """Oid of the partitioned table."""
    before: str
    """Time partitions that begin then or later are empty."""
    read: list[int]
    """Oids of the time partitions that a poll reads."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A window and its events; ``events`` is None if there are too many for one read."""

    window: Window
    events: Mapping[CursorKey, Sequence[OutboxEvent]] | None
    with_events: tuple[Lease, ...]
    """Members for which the window is opened."""
    without_events: tuple[Lease, ...] = ()
    any_visible: bool = True
    """True if any event became visible, matching or not."""


class _Update(NamedTuple):
    """Parameters of `settle` for one cursor. The statement takes an array of each, named in the plural."""

    epoch: str
    window_snapshot: str | None
    """The open window; None if the cursor is closed."""
    settled_snapshot: str | None
    """None if the window stays open."""
    next_snapshot: str | None
    """The window that the update opens."""
    lowest_id: int | None = None
    highest_id: int | None = None
    position: int | None = None
    sequence: int | None = None


def _settling(settlement: Settlement, following: Window | None) -> _Update:
    """Return the update of a settlement. ``following``: the next window of a cursor whose window closes."""
    epoch, window = settlement.lease.epoch, settlement.window_snapshot
    settled = window if settlement.closes else None
    opened = following.window_snapshot if following is not None else None
    return _Update(epoch, window, settled, opened, position=settlement.position, sequence=settlement.sequence)
