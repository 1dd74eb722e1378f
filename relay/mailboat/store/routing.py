"""Routing of events: filters as SQL predicates, and the distribution of the rows found to cursors.

Events without a match never leave the database. One read serves many subscriptions: it returns each event once, with
the subscriptions whose filter matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, Subscription
from mailboat_spec import EventSubscriptionSpec, Filter, Pattern

Predicate = sql.Composable
TRUE: Predicate = sql.SQL("true")
EVENT_COLUMNS = len(OutboxEvent._fields)


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


def any_of(predicates: Mapping[int, Predicate]) -> Predicate:
    """Return the predicate for rows that match at least one subscription."""
    if any(p is TRUE for p in predicates.values()):
        return TRUE
    return sql.SQL("({})").format(sql.SQL(" or ").join(predicates.values()))


def routes(predicates: Mapping[int, Predicate]) -> Predicate:
    """Return an expression for the numbers of the subscriptions that match a row; for a single one, its predicate."""
    if len(predicates) == 1:
        return next(iter(predicates.values()))
    cases = [
        sql.SQL("case when {} then {}::bigint end").format(p, sql.Literal(number)) for number, p in predicates.items()
    ]
    return sql.SQL("array_remove(array[{}], null)").format(sql.SQL(", ").join(cases))


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
