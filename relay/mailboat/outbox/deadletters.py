"""Dead letters for people: looked at, replayed, and cleared away.

A replayed event goes to the head of its key's parked queue, marked as a replay; the partition's owner sends it like any
parked event, so that the order of its key and the rules of ownership hold without this module knowing of them. Its dead
letter stays, with the time of the replay: history is not rewritten, and the same one is not replayed twice by mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, LiteralString, NamedTuple

from psycopg import AsyncCursor, sql

from mailboat.outbox.link import Link, Row
from mailboat.outbox.sqlfiles import statements

_SQL = statements("deadletters")
_PURGED_AT_ONCE = 5_000
_REPLAYED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Match:
    """Which events a person means. What is None does not matter."""

    outbox: str
    subscription: str | None = None
    """``namespace/name``, or the name alone."""
    number: int | None = None
    """Of the dead letter, or of the parked event."""
    event_id: str | None = None
    key: str | None = None
    type: str | None = None
    """A pattern for LIKE."""
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    """A part of the reason or of the error, in capitals or not."""

    @property
    def narrows(self) -> bool:
        """Whether anything but the outbox was given."""
        return any(value is not None for name, value in asdict(self).items() if name != "outbox")


class DeadLetter(NamedTuple):
    """A line of the list."""

    dead_id: int
    subscription: str
    partition: int
    event_id: str
    type: str
    key: str | None
    attempts: int
    reason: str
    last_error: str
    died_at: datetime
    replayed_at: datetime | None
    payload_bytes: int | None


class WholeDeadLetter(NamedTuple):
    """All that is known of one."""

    dead_id: int
    subscription: str
    partition: int
    sequence: int
    event_id: str
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    key: str | None
    attempts: int
    reason: str
    last_error: str
    first_failed_at: datetime
    last_failed_at: datetime
    died_at: datetime
    replayed_at: datetime | None
    created_at: datetime
    content_type: str
    headers: str | None
    tags: list[str]
    traceparent: str | None
    payload: bytes | None


class Candidate(NamedTuple):
    """A dead letter that may be replayed; ``partition`` is where its key lives today."""

    dead_id: int
    subscription: str
    subscription_id: int
    partition: int
    event_id: str
    type: str
    key: str | None
    replayed_at: datetime | None
    waits: bool
    """The event is parked already, by an earlier replay."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay would do."""

    replay: tuple[Candidate, ...]
    waiting: tuple[Candidate, ...]
    """Parked already: sent anyway, once their turn comes."""
    superseded: tuple[Candidate, ...]
    """The same event died again later; that later one is replayed."""


def plan(candidates: Sequence[Candidate]) -> ReplayPlan:
    """Sorts out what must not be replayed twice. Keeps the order."""
    last = {(each.subscription_id, each.event_id): each.dead_id for each in sorted(candidates)}
    fresh = [each for each in candidates if not each.waits]
    return ReplayPlan(
        tuple(each for each in fresh if last[each.subscription_id, each.event_id] == each.dead_id),
        tuple(each for each in candidates if each.waits),
        tuple(each for each in fresh if last[each.subscription_id, each.event_id] != each.dead_id),
    )


def matching(statement: LiteralString, number: str, time: str) -> sql.Composed:
    """A statement with what a person asked for put in; ``number`` and ``time`` are the columns they mean."""
    condition = sql.SQL(_SQL["matching"]).format(number=sql.Identifier("r", number), time=sql.Identifier("r", time))
    return sql.SQL(statement).format(matching=condition)


def _dead(name: str) -> sql.Composed:
    return matching(_SQL[name], "dead_id", "died_at")


async def list_dead(link: Link, match: Match, *, replayed: bool, limit: int | None) -> list[DeadLetter]:
    """The newest so many, oldest of them first."""
    async with link.autocommit() as cursor:
        await cursor.execute(_dead("dead"), {**asdict(match), "replayed": replayed, "limit": limit})
        return [DeadLetter._make(row) for row in await cursor.fetchall()]


async def show_dead(link: Link, match: Match, *, limit: int) -> list[WholeDeadLetter]:
    """Whole dead letters, replayed ones too."""
    async with link.autocommit() as cursor:
        await cursor.execute(_dead("dead_whole"), {**asdict(match), "limit": limit})
        return [WholeDeadLetter._make(row) for row in await cursor.fetchall()]


async def candidates(link: Link, match: Match, *, replayed: bool, limit: int | None) -> list[Candidate]:
    """What could be replayed, in the order in which it would be."""
    async with link.autocommit() as cursor:
        await cursor.execute(_dead("candidates"), {**asdict(match), "replayed": replayed, "limit": limit})
        return [Candidate._make(row) for row in await cursor.fetchall()]


async def replay(
    link: Link, outbox: str, chosen: Sequence[Candidate], *, again: bool, unordered: Collection[str] = ()
) -> int:
    """Put dead letters at the head of their keys' queues; returns how many were.

    ``unordered`` names subscriptions that keep no order: there nobody waits for anybody. Each partition has a
    transaction of its own. A dead letter that somebody else replayed meanwhile is left alone.
    """
    done = 0
    for (subscription_id, partition), group in _by_partition(chosen):
        ordered = group[0].subscription not in unordered
        where: dict[str, Any] = {"subscription_id": subscription_id, "partition": partition}
        async with link.transaction() as cursor:
            await hold_cursor(cursor, where)
            dead_ids = [each.dead_id for each in group]
            await cursor.execute(_SQL["replay"], {**where, "dead_ids": dead_ids, "again": again, "ordered": ordered})
            parked = await cursor.fetchall()
            if ordered:
                await order_heads(cursor, where, {key for _, key in parked if key is not None})
            await cursor.execute(_SQL["wake"], {"outbox": outbox})
        done += len(parked)
    return done


def _by_partition(chosen: Sequence[Candidate]) -> Iterator[tuple[tuple[int, int], list[Candidate]]]:
    """One partition at a time, some at a time, each in the given order."""

    def partition(each: Candidate) -> tuple[int, int]:
        return each.subscription_id, each.partition

    for key, group in groupby(sorted(chosen, key=partition), key=partition):
        letters = list(group)
        for start in range(0, len(letters), _REPLAYED_AT_ONCE):
            yield key, letters[start : start + _REPLAYED_AT_ONCE]


async def hold_cursor(cursor: AsyncCursor[Row], where: dict[str, Any]) -> None:
    """Nobody else changes parked events of the partition until the transaction ends."""
    await cursor.execute(_SQL["hold_cursor"], where)


async def order_heads(cursor: AsyncCursor[Row], where: dict[str, Any], keys: Collection[str]) -> None:
    """Make the first of each key's queue its only head."""
    if keys:
        await cursor.execute(_SQL["order_heads"], {**where, "keys": list(keys)})


async def wake(link: Link, outbox: str) -> None:
    """Let sleeping relays look at once."""
    async with link.autocommit() as cursor:
        await cursor.execute(_SQL["wake"], {"outbox": outbox})


async def purge(link: Link, match: Match, *, older_than: float) -> int:
    """Delete dead letters that were replayed more than so many seconds ago; returns how many."""
    deleted = 0
    while True:
        async with link.transaction() as cursor:
            await cursor.execute(_dead("purge"), {**asdict(match), "older_than": older_than, "limit": _PURGED_AT_ONCE})
            deleted += cursor.rowcount
            if cursor.rowcount < _PURGED_AT_ONCE:
                return deleted
