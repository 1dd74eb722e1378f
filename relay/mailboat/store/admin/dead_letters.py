"""Commands on dead letters: list, replay and purge.

A replayed event goes to the head of its key's parked queue, and the partition's owner sends it like any parked event.
The dead letter stays, with the time of the replay, so that the same event is not replayed twice by mistake.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple

from psycopg import sql

from mailboat.store.admin.selection import Match, by_partition, change_queues, matching, whole_rows
from mailboat.store.connection import PostgresConnection
from mailboat.store.sql import statements

_SQL = statements("dead_letters")
_PURGED_AT_ONCE = 5_000
_REPLAYED_AT_ONCE = 1_000


class DeadLetter(NamedTuple):
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


class Candidate(NamedTuple):
    """A dead letter that may be replayed. ``partition`` is the current partition of its key."""

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
    deleted: bool = False
    """The subscription was deleted, so no relay would send the event."""


class ReplayPlan(NamedTuple):
    replay: tuple[Candidate, ...]
    waiting: tuple[Candidate, ...]
    """Parked already, so they will be sent without a replay."""
    orphaned: tuple[Candidate, ...] = ()
    """Dead letters of deleted subscriptions. They are kept for a later subscription of the same name."""


def plan(candidates: Sequence[Candidate]) -> ReplayPlan:
    """Sort the candidates. Of several dead letters of one event, only the last is replayed. Their order is kept."""
    last = {(each.subscription_id, each.event_id): each.dead_id for each in sorted(candidates)}
    fresh = [each for each in candidates if not each.waits and not each.deleted]
    return ReplayPlan(
        tuple(each for each in fresh if last[each.subscription_id, each.event_id] == each.dead_id),
        tuple(each for each in candidates if each.waits and not each.deleted),
        tuple(each for each in candidates if each.deleted),
    )


def _dead(name: str) -> sql.Composed:
    return matching(_SQL[name], "dead_id", "died_at")


async def list_dead(link: PostgresConnection, match: Match, *, replayed: bool, limit: int | None) -> list[DeadLetter]:
    """Return the newest ``limit`` dead letters, oldest first."""
    where = {**asdict(match), "replayed": replayed, "limit": limit}
    return [DeadLetter._make(row) for row in await link.fetch(_dead("dead"), where)]


async def show_dead(link: PostgresConnection, match: Match, *, limit: int) -> list[dict[str, Any]]:
    """Return dead letters with all columns, including replayed ones. ``document``: the dead letter as JSON."""
    return await whole_rows(link, _dead("dead_whole"), match, limit)


async def candidates(link: PostgresConnection, match: Match, *, replayed: bool, limit: int | None) -> list[Candidate]:
    """Return the dead letters that could be replayed, in replay order."""
    where = {**asdict(match), "replayed": replayed, "limit": limit}
    return [Candidate._make(row) for row in await link.fetch(_dead("candidates"), where)]


async def replay(
    link: PostgresConnection, outbox: str, chosen: Sequence[Candidate], *, again: bool, unordered: Collection[str] = ()
) -> int:
    """Put dead letters at the head of their keys' queues, in one transaction per partition, and return their number.

    ``unordered`` names subscriptions where no event waits behind another. A dead letter is skipped if it was replayed
    in the meantime or its partition no longer exists.
    """
    changes = (
        {**where, "dead_ids": [each.dead_id for each in group], "again": again}
        for where, group in by_partition(chosen, unordered, at_once=_REPLAYED_AT_ONCE)
    )
    return len(await change_queues(link, outbox, _SQL["replay"], changes))


async def purge(link: PostgresConnection, match: Match, *, older_than: float, limit: int | None) -> int:
    """Delete dead letters replayed more than ``older_than`` seconds ago, oldest first, and return their number."""
    deleted = 0
    while limit is None or deleted < limit:
        at_once = _PURGED_AT_ONCE if limit is None else min(_PURGED_AT_ONCE, limit - deleted)
        async with link.transaction() as cursor:
            await cursor.execute(_dead("purge"), {**asdict(match), "older_than": older_than, "limit": at_once})
            deleted += cursor.rowcount
            if cursor.rowcount < at_once:
                break
    return deleted
