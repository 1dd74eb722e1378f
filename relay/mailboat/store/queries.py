"""Statements that read events, composed for a table and a set of subscriptions.

Filters are part of the statement text. Each subscription has its own statements, and all subscriptions together have
shared ones. A read for several subscriptions uses the shared statements, with a parameter that selects the partitions
of its members. So a statement is composed and planned once, and not for every set of subscriptions that reads together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

from psycopg import sql

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, Lease, Subscription
from mailboat.store.routing import EVENT_COLUMNS, TRUE, Predicate, any_of, fan_out, fan_out_single, routes
from mailboat.store.sql import statements
from mailboat.store.table import COLUMNS, ROW_BYTES, TOO_LARGE_COLUMNS, TableLayout

_SQL = statements("windows")

_UNDONE = sql.SQL("not pg_visible_in_snapshot(e.xid, (select settled_snapshot from w))")
_UNDONE_BEFORE = sql.SQL("not mailboat.settled_before((select previous_layout from w), e.slot, e.xid, e.id)")


@dataclass(frozen=True, slots=True)
class SubscriptionQuery:
    """A subscription and the predicate of its filter."""

    subscription: Subscription
    wanted: Predicate


class TailKind(NamedTuple):
    """Kind of a poll."""

    late: bool
    """Transactions were running in ``settled_snapshot``, and their events may have become visible."""
    before: str | None
    """Time partitions that begin then or later are left out (`time_partitions`). None: all are read."""


class ChunkKind(NamedTuple):
    """Kind of chunk of a large window."""

    carry_over: bool
    """Cursors of the previous layout settled some of its events (carry-over)."""
    too_large: bool
    """The chunk is a single row larger than any relay can deliver."""


@dataclass(frozen=True, slots=True)
class ComposedQueries:
    """Statements for one set of subscriptions, and the routing of their rows."""

    small_window: bytes
    late: bytes
    large_window: Mapping[ChunkKind, bytes]
    chunk_end: bytes
    chunk_end_within: bytes
    subscriptions: Mapping[int, Subscription]
    offsets: Mapping[int, int]
    """Place of each subscription's first partition in ``own``."""
    _parts: Mapping[str, Any]
    _tails: dict[TailKind, bytes]

    def tail(self, kind: TailKind) -> bytes:
        """Return the poll. ``before`` is a part of its text, so that its plan has only the time partitions that it
        reads: the server locks all tables of a plan at every execution."""
        if kind not in self._tails:
            if any(former.before != kind.before for former in self._tails):  # a new day
                self._tails.clear()
            self._tails[kind] = _tail(kind, self._parts)
        return self._tails[kind]

    def own(self, members: Iterable[Lease]) -> dict[str, str]:
        """Return the parameter that selects the events of these members' partitions: one bit per partition.

        Events of other partitions are not sent, so a relay pays for the rows that it delivers.
        """
        bits = bytearray(b"0" * sum(each.partitions for each in self.subscriptions.values()))
        for (number, partition), _ in members:
            bits[self.offsets[number] + partition] = ord("1")
        return {"own": bits.decode()}

    @property
    def width(self) -> int:
        """Number of columns of a matching row: the event, and for several subscriptions the numbers that match."""
        return EVENT_COLUMNS if len(self.subscriptions) == 1 else EVENT_COLUMNS + 1

    def fan_out(
        self, rows: Iterable[Sequence[Any]], members: frozenset[CursorKey]
    ) -> dict[CursorKey, list[OutboxEvent]]:
        """Route matching rows of a window to the members they belong to."""
        if len(self.subscriptions) == 1:
            (subscription,) = self.subscriptions.values()
            return fan_out_single(rows, subscription, members)
        return fan_out(((row[:EVENT_COLUMNS], row[EVENT_COLUMNS]) for row in rows), self.subscriptions, members)


class QueryCache:
    """All statements that depend on the outbox's columns or on the filters of subscriptions."""

    def __init__(self, layout: TableLayout) -> None:
        self._fixed = {
            "rows": layout.rows,
            "columns": COLUMNS,
            "row_bytes": ROW_BYTES,
            "outbox": layout.regclass,
            "head": sql.SQL(_SQL["head"]),
            "this_window": sql.SQL(_SQL["this_window"]),
        }
        self._cached: tuple[Mapping[int, SubscriptionQuery], dict[tuple[int, ...], ComposedQueries]] = ({}, {})
        """The subscription set, and its statements so far. Replaced as a whole, because threads compose statements."""
        self.span = sql.SQL(_SQL["span"]).format(**self._fixed).as_bytes()

    def route(self, routes_by_number: Mapping[int, SubscriptionQuery]) -> None:
        """Replace the subscription set."""
        self._cached = (routes_by_number, {})

    def for_members(self, members: Iterable[Lease]) -> ComposedQueries:
        """Return the statements that read for these cursors."""
        routes_by_number, composed = self._cached
        found = {lease.key.subscription for lease in members}
        numbers = tuple(found) if len(found) == 1 else tuple(sorted(routes_by_number))
        if numbers not in composed:
            composed[numbers] = self._compose({number: routes_by_number[number] for number in numbers})
        return composed[numbers]

    def _compose(self, queries: Mapping[int, SubscriptionQuery]) -> ComposedQueries:
        subscriptions = {number: query.subscription for number, query in queries.items()}
        offsets = dict(
            zip(queries, accumulate((s.partitions for s in subscriptions.values()), initial=0), strict=False)
        )
        wanted = {
            number: _among_own(query.wanted, offsets[number], query.subscription.partitions)
            for number, query in queries.items()
        }
        single = len(queries) == 1
        parts: dict[str, Any] = {
            **self._fixed,
            "also_routes": sql.SQL("") if single else sql.SQL(", {}").format(routes(wanted)),
            "wanted": any_of(wanted),
        }
        return ComposedQueries(
            sql.SQL(_SQL["small_window"]).format(**parts).as_bytes(),
            sql.SQL(_SQL["late"]).format(**parts).as_bytes(),
            {ChunkKind(*kind): _large_window(ChunkKind(*kind), parts) for kind in product((False, True), repeat=2)},
            sql.SQL(_SQL["chunk_end"]).format(**parts).as_bytes(),
            sql.SQL(_SQL["chunk_end_within"]).format(**parts).as_bytes(),
            subscriptions,
            offsets,
            parts,
            {},
        )


def _among_own(wanted: Predicate, offset: int, partitions: int) -> Predicate:
    """Return the predicate for the rows of a subscription that lie in partitions with a bit in ``own``."""
    own = sql.SQL("get_bit(%(own)s::varbit, ({} + found.slot %% {})::integer) = 1").format(
        sql.Literal(offset), sql.Literal(partitions)
    )
    return own if wanted is TRUE else sql.SQL("({} and {})").format(wanted, own)


def _tail(kind: TailKind, parts: Mapping[str, Any]) -> bytes:
    pruning: dict[str, sql.Composable]
    if kind.before is None:
        pruning = {"occupied": sql.SQL(""), "stray": sql.SQL("false")}
    else:
        occupied = sql.SQL(_SQL["occupied"]).format(before=sql.Literal(kind.before))
        pruning = {"occupied": occupied, "stray": sql.SQL(_SQL["stray"]).format(**parts)}
    late_arm = sql.SQL(_SQL["late_arm"]).format(**parts, **pruning) if kind.late else sql.SQL("")
    return sql.SQL(_SQL["tail"]).format(late_arm=late_arm, **parts, **pruning).as_bytes()


def _large_window(kind: ChunkKind, parts: dict[str, Any]) -> bytes:
    columns = TOO_LARGE_COLUMNS if kind.too_large else COLUMNS
    undone = _UNDONE_BEFORE if kind.carry_over else _UNDONE
    return sql.SQL(_SQL["large_window"]).format(**{**parts, "columns": columns, "undone": undone}).as_bytes()
