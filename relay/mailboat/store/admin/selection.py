"""Selection of events and changes of queues, shared by the commands on dead letters and parked events.

A queue of parked events belongs to the owner of its partition, which changes the queue when it settles. A command locks
the partition's cursor to exclude the owner, and keeps the invariant that the owner relies on: one head per key.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, LiteralString, TypeVar

from psycopg import AsyncCursor, sql

from mailboat.store.connection import PostgresConnection, Row, Statement
from mailboat.store.parked_rows import SCHEDULE_HEADS
from mailboat.store.sql import statements

_SQL = statements("selection")


@dataclass(frozen=True, slots=True)
class Match:
    """Selection of events by a command. Fields that are None do not restrict it."""

    outbox: str
    subscription: str | None = None
    """``namespace/name``, or the name alone."""
    number: int | None = None
    """Number of the dead letter or of the parked event."""
    event_id: str | None = None
    key: str | None = None
    type: str | None = None
    """A pattern for LIKE."""
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    """A part of the reason or of the error, case-insensitive."""

    @property
    def narrows(self) -> bool:
        return any(value is not None for name, value in asdict(self).items() if name != "outbox")


PlacedT = TypeVar("PlacedT", bound=Any)
"""A named tuple with ``subscription``, ``subscription_id`` and ``partition``."""
Change = dict[str, Any]
"""Parameters of a statement that changes the queues of one partition."""


def matching(statement: LiteralString, number: str, time: str, **parts: sql.Composable) -> sql.Composed:
    """Insert the conditions of a `Match`, on the columns ``number`` and ``time``, into a statement."""
    condition = sql.SQL(_SQL["matching"]).format(number=sql.Identifier("r", number), time=sql.Identifier("r", time))
    return sql.SQL(statement).format(matching=condition, **parts)


async def whole_rows(link: PostgresConnection, statement: Statement, match: Match, limit: int) -> list[dict[str, Any]]:
    """Return the selected rows with all columns by name, in the order in which a command prints them."""
    async with link.autocommit() as cursor:
        await cursor.execute(statement, {**asdict(match), "limit": limit})
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]


def by_partition(
    chosen: Sequence[PlacedT], unordered: Collection[str], *, at_once: int
) -> Iterator[tuple[Change, list[PlacedT]]]:
    """Yield the rows by partition, at most ``at_once`` at a time, in the given order."""
    partitions: dict[tuple[int, int], list[PlacedT]] = defaultdict(list)
    for each in chosen:
        partitions[each.subscription_id, each.partition].append(each)
    for subscription, partition in sorted(partitions):
        rows = partitions[subscription, partition]
        where = {"subscription": subscription, "partition": partition, "ordered": rows[0].subscription not in unordered}
        for start in range(0, len(rows), at_once):
            yield where, rows[start : start + at_once]


async def change_queues(
    link: PostgresConnection, outbox: str, statement: Statement, changes: Iterable[Change], *, new_heads: bool = True
) -> list[Row]:
    """Make each change in a transaction of its own and return all rows. Idle relays are notified, to poll immediately.

    With ``new_heads``, make the first event of each returned key's queue its only head. A partition that no longer
    exists is skipped: it has no parked events, and none must be added.
    """
    changed: list[Row] = []
    for change in changes:
        async with link.transaction() as cursor:
            if not await _hold_cursor(cursor, change):
                continue
            await cursor.execute(statement, change)
            rows = await cursor.fetchall()
            if new_heads and change["ordered"]:
                keys = {key for _, key in rows if key is not None}
                await cursor.execute(SCHEDULE_HEADS, {**change, "keys": list(keys)})
        await link.fetch(_SQL["wake"], {"outbox": outbox})
        changed += rows
    return changed


async def _hold_cursor(cursor: AsyncCursor[Row], where: Change) -> bool:
    """Lock the partition's cursor until the transaction ends, which excludes other changes to its parked events.

    Return False if the partition no longer exists. If repartitioning replaces the cursor during the wait for its lock,
    the statement returns no row, and a second one finds the new cursor.
    """
    for _ in range(2):
        await cursor.execute(_SQL["hold_cursor"], where)
        if await cursor.fetchone() is not None:
            return True
    return False
