"""Snapshots and rows of an outbox in memory, with the rules that concern a single row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, LastFailure, Park, Parked, Series, Settlement, Window
from mailboat_spec import EventSubscriptionSpec

_SLOTS = 2**31 - 1
GENERATION = 1
"""Generation of all sequence numbers: the store in memory does not support repartitioning."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Set of ended transactions: those below ``xmax`` and not in progress. The text format is that of Postgres."""

    xmax: int
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        _, xmax, listed = text.split(":")
        return cls(int(xmax), frozenset(map(int, filter(None, listed.split(",")))))

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.in_progress)))}"

    @property
    def xmin(self) -> int:
        return min(self.in_progress, default=self.xmax)

    def sees(self, xid: int) -> bool:
        return xid < self.xmax and xid not in self.in_progress


def slot_of(key: str | None, id: int) -> int:
    """Return the same slot as ``mailboat.key_slot`` in SQL."""
    if key is None:
        return id % _SLOTS
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) & _SLOTS


def timestamp(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One row of the outbox."""

    event: OutboxEvent
    xid: int
    tags: frozenset[str]
    created_at: datetime

    def wanted_by(self, spec: EventSubscriptionSpec) -> bool:
        """Return True if the row matches the subscription's filter and start."""
        wanted, start, event = spec.filter, spec.start, self.event
        types = not wanted.event_types or any(p.matches(event.type) for p in wanted.event_types)
        aggregate = event.aggregate_type
        aggregates = not wanted.aggregate_types or any(
            str(p) == "*" or (aggregate is not None and p.matches(aggregate)) for p in wanted.aggregate_types
        )
        tags = (
            self.tags.issuperset(wanted.tags.all_of)
            and (not wanted.tags.any_of or not self.tags.isdisjoint(wanted.tags.any_of))
            and self.tags.isdisjoint(wanted.tags.none_of)
        )
        begun = (start.time is None or self.created_at >= start.time) and event.id >= (start.position or 0)
        return types and aggregates and tags and begun


@dataclass(slots=True)
class CursorRow:
    """Progress and owner of one partition."""

    settled_snapshot: str
    window_snapshot: str | None = None
    lowest: int | None = None
    highest: int | None = None
    position: int = 0
    highest_settled_id: int = 0
    sequence: int = 0
    crash_count: int = 0
    owner: str | None = None
    epoch: str | None = None
    released: bool = True
    assigned_to: str | None = None

    @property
    def window(self) -> Window | None:
        return (
            Window(self.settled_snapshot, self.window_snapshot, self.lowest, self.highest)
            if self.window_snapshot is not None
            else None
        )

    def look(self, window: Window, *, has_events: bool) -> None:
        """Open the window, or advance past it if it has no events."""
        self.crash_count = 0
        if has_events:
            self.window_snapshot, self.lowest, self.highest, self.position = (
                window.window_snapshot,
                window.lowest,
                window.highest,
                0,
            )
        else:
            self.settled_snapshot = window.window_snapshot

    def settle(self, settlement: Settlement) -> None:
        self.highest_settled_id = max(self.highest_settled_id, settlement.position)
        self.sequence, self.crash_count = settlement.sequence, 0
        self.position = max(self.position, settlement.position)
        if settlement.closes:
            self.settled_snapshot, self.window_snapshot = self.window_snapshot or self.settled_snapshot, None
            self.lowest = self.highest = None
            self.position = 0

    def has_settled(self, row: MemoryRow) -> bool:
        in_window = (
            self.window_snapshot is not None
            and Snapshot.parse(self.window_snapshot).sees(row.xid)
            and row.event.id <= self.position
        )
        return in_window or Snapshot.parse(self.settled_snapshot).sees(row.xid)


@dataclass(slots=True)
class ParkedRow:
    """A parked event."""

    ordinal: int
    cursor: CursorKey
    event: OutboxEvent
    sequence: int
    attempts: int
    rank: int = 1
    replay: bool = False
    next_attempt_at: datetime | None = None
    blocked: bool = False
    suspect: bool = False
    pending_dead_letter: bool = False
    failure: LastFailure | None = None
    first_failed_at: str | None = None

    @classmethod
    def of(cls, ordinal: int, cursor: CursorKey, park: Park, now: datetime) -> ParkedRow:
        return cls(
            ordinal,
            cursor,
            park.event,
            park.sequence,
            park.attempts,
            next_attempt_at=_in(park.retry_in, now),
            blocked=park.blocked,
            suspect=park.suspect,
            pending_dead_letter=park.pending_dead_letter,
            failure=park.failure,
            first_failed_at=timestamp(now) if park.failure is not None else None,
        )

    def order(self) -> tuple[int, int, int]:
        """Sort key of the queue: replayed events first, by id, then the others in the order of parking."""
        return self.rank, self.event.id if self.rank == 0 else 0, self.ordinal

    def is_due(self, now: datetime) -> bool:
        return self.next_attempt_at is not None and self.next_attempt_at <= now

    def fail_again(self, park: Park, now: datetime) -> None:
        self.attempts = max(self.attempts, park.attempts)
        self.next_attempt_at = _in(park.retry_in, now)
        self.blocked, self.pending_dead_letter = park.blocked, park.pending_dead_letter
        self.failure = park.failure or self.failure
        self.first_failed_at = self.first_failed_at or timestamp(now)

    def as_read(self) -> Parked:
        return Parked(
            self.ordinal,
            self.event,
            self.sequence,
            Series(self.cursor.partition, GENERATION),
            self.attempts,
            self.replay,
            self.suspect,
            self.blocked,
            self.pending_dead_letter,
            self.failure,
            self.first_failed_at,
        )


@dataclass(frozen=True, slots=True)
class DeadRow:
    """A dead letter."""

    cursor: CursorKey
    event: OutboxEvent
    sequence: int
    attempts: int
    failure: LastFailure


def _in(seconds: float | None, now: datetime) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)
