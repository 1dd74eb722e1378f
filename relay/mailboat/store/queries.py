"""Statements that read events, composed for a table and a set of subscriptions, and the routing of their rows.

Events without a match never leave the database: filters are part of the statement text. One read serves many
subscriptions: it returns each event once, with the subscriptions whose filter matches, and the fan-out distributes the
rows to the partitions of the reader.

Each subscription has its own statements. A read for several subscriptions uses the statements for all, with a parameter
that selects the partitions of its members: a statement is composed and planned once, and not for every set of
subscriptions that reads together.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from psycopg import sql

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, Lease, Subscription
from mailboat.store.sql import statements
from mailboat.store.table import COLUMNS, ROW_BYTES, TOO_LARGE_COLUMNS, TableLayout
from mailboat_spec import EventSubscriptionSpec, Filter, Pattern

_SQL = statements("windows")
Predicate = sql.Composable
TRUE: Predicate = sql.SQL("true")
EVENT_COLUMNS = len(OutboxEvent._fields)

_UNDONE = sql.SQL("not pg_visible_in_snapshot(e.xid, (select settled_snapshot from w))")
_UNDONE_BEFORE = sql.SQL("not mailboat.settled_before((select previous_layout from w), e.slot, e.xid, e.id)")


@dataclass(frozen=True, slots=True)
class Since:
    """Start of a subscription that begins neither at the earliest nor at the latest event."""

    time: str | None = None
    id: int | None = None


def effective_filter(name: str, spec: EventSubscriptionSpec) -> Filter:
    """Return the subscription's filter. A pull subscription that emits its dead letters does not receive them."""
    if spec.sink.pull is None or not spec.sink.pull.emit_dead_letters:
        return spec.filter
    tags = spec.filter.tags
    none_of = (*tags.none_of, f"dead-letter-of={name}")
    return spec.filter.model_copy(update={"tags": tags.model_copy(update={"none_of": none_of})})


def predicate(wanted: Filter, since: Since) -> Predicate:
    """Return the predicate on a row ``found`` of the outbox, with Mailboat's column names."""
    terms = [
        *_any_pattern(sql.SQL("found.event_type"), wanted.event_types),
        *_any_pattern(sql.SQL("found.aggregate_type"), wanted.aggregate_types),
    ]
    if wanted.tags.all_of:
        terms.append(sql.SQL("found.tags @> {}::text[]").format(_texts(wanted.tags.all_of)))
    if wanted.tags.any_of:
        terms.append(sql.SQL("found.tags && {}::text[]").format(_texts(wanted.tags.any_of)))
    if wanted.tags.none_of:
        terms.append(sql.SQL("not found.tags && {}::text[]").format(_texts(wanted.tags.none_of)))
    if since.time is not None:
        terms.append(sql.SQL("found.created_at >= {}::timestamptz").format(sql.Literal(since.time)))
    if since.id is not None:
        terms.append(sql.SQL("found.id >= {}").format(sql.Literal(since.id)))
    return sql.SQL("({})").format(sql.SQL(" and ").join(terms)) if terms else TRUE


def like_patterns(patterns: Sequence[Pattern]) -> list[str] | None:
    """Return the LIKE patterns; None if every value matches."""
    if not patterns or any(str(pattern) == "*" for pattern in patterns):
        return None
    return [pattern.like() for pattern in patterns]


def _any_pattern(column: sql.SQL, patterns: Sequence[Pattern]) -> list[Predicate]:
    if like_patterns(patterns) is None:
        return []
    literals = [str(pattern) for pattern in patterns if pattern.is_literal]
    shapes = [pattern.like() for pattern in patterns if not pattern.is_literal]
    terms: list[Predicate] = []
    if literals:
        terms.append(sql.SQL("{} = any ({}::text[])").format(column, _texts(literals)))
    if shapes:
        terms.append(sql.SQL("{} like any ({}::text[])").format(column, _texts(shapes)))
    return [sql.SQL("coalesce({}, false)").format(sql.SQL(" or ").join(terms))]


def _texts(values: Iterable[str]) -> Predicate:
    """Return an array literal of texts. Percent signs are doubled, because the statements have placeholders."""
    return sql.Literal([value.replace("%", "%%") for value in values])


def any_of(predicates: Collection[Predicate]) -> Predicate:
    return TRUE if TRUE in predicates else sql.SQL("({})").format(sql.SQL(" or ").join(predicates))


def routes(predicates: Mapping[int, Predicate]) -> Predicate:
    """Return an expression for the numbers of the subscriptions that match a row."""
    cases = [
        sql.SQL("case when {} then {}::bigint end").format(p, sql.Literal(number)) for number, p in predicates.items()
    ]
    return sql.SQL("array_remove(array[{}], null)").format(sql.SQL(", ").join(cases))


@dataclass(frozen=True, slots=True)
class SubscriptionQuery:
    subscription: Subscription
    wanted: Predicate
    pulled: bool = False
    """Consumers own the partitions, so relays claim none of them."""


class TailKind(NamedTuple):
    late: bool
    """Transactions were running in ``settled_snapshot``, and their events may have become visible."""
    before: str | None
    """Time partitions that begin then or later are left out (`time_partitions`). None: all are read."""


class ChunkKind(NamedTuple):
    carry_over: bool
    """Cursors of the previous layout settled some of its events (carry-over)."""
    too_large: bool
    """The chunk is a single row larger than any relay can deliver."""


class ComposedQueries:
    """Statements for one set of subscriptions, and the routing of their rows."""

    def __init__(self, fixed: Mapping[str, sql.Composable], queries: Mapping[int, SubscriptionQuery]) -> None:
        self.subscriptions = {number: query.subscription for number, query in queries.items()}
        sizes = [each.partitions for each in self.subscriptions.values()]
        self._offsets = dict(zip(queries, accumulate(sizes, initial=0), strict=False))
        """Place of each subscription's first partition in ``own``."""
        wanted = {
            number: _among_own(query.wanted, self._offsets[number], query.subscription.partitions)
            for number, query in queries.items()
        }
        also_routes = sql.SQL("") if len(queries) == 1 else sql.SQL(", {}").format(routes(wanted))
        self._parts = {**fixed, "also_routes": also_routes, "wanted": any_of(wanted.values())}
        self.small_window = self._composed("small_window")
        self.late = self._composed("late")
        self.chunk_end = self._composed("chunk_end")
        self.chunk_end_within = self._composed("chunk_end_within")
        self.large_window = {
            ChunkKind(carry_over, too_large): self._composed("large_window", undone=undone, columns=columns)
            for carry_over, undone in ((False, _UNDONE), (True, _UNDONE_BEFORE))
            for too_large, columns in ((False, COLUMNS), (True, TOO_LARGE_COLUMNS))
        }
        self._tails: dict[TailKind, bytes] = {}

    def _composed(self, name: str, **parts: sql.Composable) -> bytes:
        return sql.SQL(_SQL[name]).format(**self._parts | parts).as_bytes()

    def tail(self, kind: TailKind) -> bytes:
        """Return the poll. ``before`` is a part of its text, so that its plan has only the time partitions that it
        reads: the server locks all tables of a plan at every execution."""
        if kind not in self._tails:
            if any(former.before != kind.before for former in self._tails):  # a new day
                self._tails.clear()
            pruned = kind.before is not None
            parts = self._parts | {
                "occupied": sql.SQL(_SQL["occupied"] if pruned else "").format(before=sql.Literal(kind.before)),
                "stray": sql.SQL(_SQL["stray"] if pruned else "false").format(**self._parts),
            }
            parts["late_arm"] = sql.SQL(_SQL["late_arm"] if kind.late else "").format(**parts)
            self._tails[kind] = sql.SQL(_SQL["tail"]).format(**parts).as_bytes()
        return self._tails[kind]

    def own(self, members: Iterable[Lease]) -> dict[str, str]:
        """Return the parameter that selects the events of these members' partitions: one bit per partition.

        Events of other partitions are not sent, so a relay pays for the rows that it delivers.
        """
        bits = bytearray(b"0" * sum(each.partitions for each in self.subscriptions.values()))
        for (number, partition), _ in members:
            bits[self._offsets[number] + partition] = ord("1")
        return {"own": bits.decode()}

    @property
    def width(self) -> int:
        """Number of columns of a matching row: the event, and for several subscriptions the numbers that match."""
        return EVENT_COLUMNS if len(self.subscriptions) == 1 else EVENT_COLUMNS + 1

    def fan_out(
        self, rows: Iterable[Sequence[Any]], members: frozenset[CursorKey]
    ) -> dict[CursorKey, list[OutboxEvent]]:
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
        self._cached = (routes_by_number, {})

    def for_members(self, members: Iterable[Lease]) -> ComposedQueries:
        routes_by_number, composed = self._cached
        found = {lease.key.subscription for lease in members}
        numbers = tuple(found) if len(found) == 1 else tuple(sorted(routes_by_number))
        if numbers not in composed:
            queries = {number: routes_by_number[number] for number in numbers}
            composed[numbers] = ComposedQueries(self._fixed, queries)
        return composed[numbers]


def _among_own(wanted: Predicate, offset: int, partitions: int) -> Predicate:
    """Return the predicate for the rows of a subscription that lie in partitions with a bit in ``own``."""
    own = sql.SQL("get_bit(%(own)s::varbit, ({} + found.slot %% {})::integer) = 1").format(
        sql.Literal(offset), sql.Literal(partitions)
    )
    return own if wanted is TRUE else sql.SQL("({} and {})").format(wanted, own)


def fan_out_single(
    rows: Iterable[Sequence[Any]], subscription: Subscription, members: frozenset[CursorKey]
) -> dict[CursorKey, list[OutboxEvent]]:
    """Route the rows of one subscription to its partitions that are members. Flat, because it loops over events."""
    routed: list[list[OutboxEvent]] = [[] for _ in range(subscription.partitions)]
    partitions, new, slot = subscription.partitions, tuple.__new__, EVENT_COLUMNS - 1
    for row in rows:
        routed[row[slot] % partitions].append(new(OutboxEvent, row))
    keys = (CursorKey(subscription.number, partition) for partition in range(partitions))
    return {key: events for key, events in zip(keys, routed, strict=True) if events and key in members}


def fan_out(
    rows: Iterable[tuple[Sequence[Any], Sequence[int]]],
    subscriptions: Mapping[int, Subscription],
    members: frozenset[CursorKey],
) -> dict[CursorKey, list[OutboxEvent]]:
    """Route rows with their matching subscriptions to the members among those subscriptions' partitions."""
    routed: dict[CursorKey, list[OutboxEvent]] = {}
    partitions, new = {number: each.partitions for number, each in subscriptions.items()}, tuple.__new__
    for columns, matching in rows:
        event = OutboxEvent._make(columns)
        slot = event.slot
        for number in matching:
            key = new(CursorKey, (number, slot % partitions[number]))
            if key in members:
                routed.setdefault(key, []).append(event)
    return routed
