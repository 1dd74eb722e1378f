"""Parked events for people: looked at, tried at once, or given up on.

The pump retries parked events by itself; this is for somebody who knows better. Nothing here jumps a queue: a retry is
of the head of a key, whichever of its events was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

from psycopg import sql

from mailboat.outbox.deadletters import Match, hold_cursor, matching, order_heads, wake
from mailboat.outbox.link import Link
from mailboat.outbox.sqlfiles import statements

_SQL = statements("parkinglot")


class ParkedEvent(NamedTuple):
    """A line of the list."""

    ordinal: int
    subscription: str
    subscription_id: int
    partition: int
    event_id: str
    type: str
    key: str | None
    attempts: int
    next_attempt_at: datetime | None
    blocked: bool
    doomed: bool
    replay: bool
    reason: str | None
    last_error: str | None
    parked_at: datetime
    place: int
    """In the queue of its key; 1 is the head, the one that is tried."""
    behind: int


class WholeParkedEvent(NamedTuple):
    """All that is known of one."""

    ordinal: int
    subscription: str
    partition: int
    sequence: int
    event_id: str
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    key: str | None
    attempts: int
    next_attempt_at: datetime | None
    blocked: bool
    doomed: bool
    replay: bool
    reason: str | None
    last_error: str | None
    first_failed_at: datetime | None
    last_failed_at: datetime | None
    parked_at: datetime
    created_at: datetime
    content_type: str
    headers: str | None
    tags: list[str]
    traceparent: str | None
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Retried:
    """What a retry set in motion."""

    heads: int
    unblocked: int
    """Of those, the ones that were blocked; their attempts are counted anew."""


async def list_parked(link: Link, match: Match, *, behind: bool, limit: int | None) -> list[ParkedEvent]:
    """Heads; with ``behind``, those that wait behind them too."""
    async with link.autocommit() as cursor:
        await cursor.execute(_parked("parked"), {**asdict(match), "behind": behind, "limit": limit})
        return [ParkedEvent._make(row) for row in await cursor.fetchall()]


async def show_parked(link: Link, match: Match, *, limit: int) -> list[WholeParkedEvent]:
    """Whole parked events."""
    async with link.autocommit() as cursor:
        await cursor.execute(_parked("parked_whole"), {**asdict(match), "limit": limit})
        return [WholeParkedEvent._make(row) for row in await cursor.fetchall()]


async def retry(link: Link, outbox: str, chosen: Sequence[ParkedEvent]) -> Retried:
    """The heads of these events' keys are due now; blocked ones are unblocked and counted anew."""
    heads = unblocked = 0
    for where, group in _by_partition(chosen):
        keys = list({each.key for each in group if each.key is not None})
        ordinals = [each.ordinal for each in group if each.key is None]
        async with link.transaction() as cursor:
            await hold_cursor(cursor, where)
            await cursor.execute(_SQL["retry"], {**where, "keys": keys, "ordinals": ordinals})
            rows = await cursor.fetchall()
        heads += len(rows)
        unblocked += sum(1 for _, was_blocked in rows if was_blocked)
    await wake(link, outbox)
    return Retried(heads, unblocked)


async def drop(link: Link, outbox: str, chosen: Sequence[ParkedEvent]) -> int:
    """Make dead letters of these events; what waited behind them goes on. Returns how many."""
    dropped = 0
    for where, group in _by_partition(chosen):
        async with link.transaction() as cursor:
            await hold_cursor(cursor, where)
            await cursor.execute(_SQL["drop"], {**where, "ordinals": [each.ordinal for each in group]})
            rows = await cursor.fetchall()
            await order_heads(cursor, where, {key for _, key in rows if key is not None})
        dropped += len(rows)
    await wake(link, outbox)
    return dropped


def _parked(name: str) -> sql.Composed:
    return matching(_SQL[name], "ordinal", "parked_at")


def _by_partition(chosen: Sequence[ParkedEvent]) -> Iterator[tuple[dict[str, Any], list[ParkedEvent]]]:
    def partition(each: ParkedEvent) -> tuple[int, int]:
        return each.subscription_id, each.partition

    for (subscription_id, number), group in groupby(sorted(chosen, key=partition), key=partition):
        yield {"subscription_id": subscription_id, "partition": number}, list(group)
