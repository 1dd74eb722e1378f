"""Routing of events to cursors, as pure functions, so that one read serves many subscriptions.

A statement returns each event once, with the subscriptions whose filter matches. These functions fan the rows out to
the partitions that the reader serves. The loops run once per event, so they are kept flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, Subscription

EVENT_COLUMNS = len(OutboxEvent._fields)


def fan_out_single(
    rows: Iterable[Sequence[Any]], subscription: Subscription, members: frozenset[CursorKey]
) -> dict[CursorKey, list[OutboxEvent]]:
    """Route the rows of one subscription to its partitions that are members."""
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
