"""Commands on parked events: list, retry at once, drop.

No command breaks the order of a key: a retry applies to the head of the key, whichever of its events was selected.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple

from psycopg import sql

from mailboat.store.admin.selection import Match, by_partition, change_queues, matching, whole_rows
from mailboat.store.connection import PostgresConnection
from mailboat.store.parked_rows import QUEUE_ORDER, SERIES
from mailboat.store.sql import statements

_SQL = statements("parked_events")
_DROP = sql.SQL(_SQL["drop"]).format(series=SERIES)
_LIST = matching(_SQL["parked"], "ordinal", "parked_at", queue_order=QUEUE_ORDER)
_SHOW = matching(_SQL["parked_whole"], "ordinal", "parked_at")
_RETRY = sql.SQL(_SQL["retry"]).format(queue_order=QUEUE_ORDER)
_AT_ONCE = 5_000


class ParkedEvent(NamedTuple):
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
    pending_dead_letter: bool
    replay: bool
    reason: str | None
    last_error: str | None
    parked_at: datetime
    place: int
    """Place in the queue of its key. The head, which is retried, has 1."""
    behind: int


class Retried(NamedTuple):
    heads: int
    unblocked: int
    """Number of heads that were blocked."""


async def list_parked(link: PostgresConnection, match: Match, *, behind: bool, limit: int | None) -> list[ParkedEvent]:
    """Return the heads; with ``behind``, also the events that wait behind them."""
    where = {**asdict(match), "behind": behind, "limit": limit}
    return [ParkedEvent._make(row) for row in await link.fetch(_LIST, where)]


async def show_parked(link: PostgresConnection, match: Match, *, limit: int) -> list[dict[str, Any]]:
    return await whole_rows(link, _SHOW, match, limit)


async def retry(
    link: PostgresConnection, outbox: str, chosen: Sequence[ParkedEvent], *, unordered: Collection[str] = ()
) -> Retried:
    """Make the heads of these events' keys due now. Blocked heads are unblocked, and their attempts restart at 0.

    ``unordered`` names subscriptions without ordering, where each event is its own head.
    """
    changes = []
    for where, group in by_partition(chosen, unordered, at_once=_AT_ONCE):
        ordered = where["ordered"]
        keys = list({each.key for each in group if each.key is not None}) if ordered else []
        ordinals = [each.ordinal for each in group if each.key is None or not ordered]
        changes.append({**where, "keys": keys, "ordinals": ordinals})
    rows = await change_queues(link, outbox, _RETRY, changes, new_heads=False)
    return Retried(len(rows), sum(1 for _, was_blocked in rows if was_blocked))


async def drop(
    link: PostgresConnection, outbox: str, chosen: Sequence[ParkedEvent], *, unordered: Collection[str] = ()
) -> int:
    """Turn these events into dead letters and return their number. Events that waited behind them continue."""
    changes = (
        {**where, "ordinals": [each.ordinal for each in group]}
        for where, group in by_partition(chosen, unordered, at_once=_AT_ONCE)
    )
    return len(await change_queues(link, outbox, _DROP, changes))
