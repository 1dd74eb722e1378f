"""What people's commands on dead letters and parked events share: which events are meant, and how a queue is changed.

A queue of parked events belongs to the owner of its partition, who changes it while it settles. A person's command
takes turns with the owner by holding the partition's cursor, and leaves what the owner expects: one head per key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import LiteralString, Protocol, TypedDict, TypeVar

from psycopg import AsyncCursor, sql

from mailboat.outbox.link import Link, Row
from mailboat.outbox.parking import LINE_UP
from mailboat.outbox.sqlfiles import statements

_SQL = statements("interventions")


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


class Where(TypedDict):
    """A partition, as parameters of a statement."""

    subscription: int
    partition: int


class Placed(Protocol):
    """A row that lies in a partition."""

    @property
    def subscription_id(self) -> int: ...

    @property
    def partition(self) -> int: ...


PlacedT = TypeVar("PlacedT", bound=Placed)


def matching(statement: LiteralString, number: str, time: str, **parts: sql.Composable) -> sql.Composed:
    """A statement with what a person asked for put in; ``number`` and ``time`` are the columns they mean."""
    condition = sql.SQL(_SQL["matching"]).format(number=sql.Identifier("r", number), time=sql.Identifier("r", time))
    return sql.SQL(statement).format(matching=condition, **parts)


def by_partition(chosen: Sequence[PlacedT], *, at_once: int) -> Iterator[tuple[Where, list[PlacedT]]]:
    """One partition after the other, so many rows at a time, each in the given order."""

    def partition(each: PlacedT) -> tuple[int, int]:
        return each.subscription_id, each.partition

    for (subscription, number), group in groupby(sorted(chosen, key=partition), key=partition):
        rows = list(group)
        for start in range(0, len(rows), at_once):
            yield Where(subscription=subscription, partition=number), rows[start : start + at_once]


@asynccontextmanager
async def holding_cursor(link: Link, where: Where) -> AsyncIterator[AsyncCursor[Row]]:
    """A transaction in which nobody else changes parked events of the partition.

    A partition that is gone has none: then nothing is held, and nothing found. Who adds some asks ``hold_cursor``.
    """
    async with link.transaction() as cursor:
        await hold_cursor(cursor, where)
        yield cursor


async def hold_cursor(cursor: AsyncCursor[Row], where: Where) -> bool:
    """Holds the partition's cursor until the transaction ends; False: there is none any more.

    Who waits for a cursor that a new layout deletes finds nothing, though another one is in its place. Asked again, a
    statement sees that one.
    """
    for _ in range(2):
        await cursor.execute(_SQL["hold_cursor"], where)
        if await cursor.fetchone() is not None:
            return True
    return False


async def line_up(cursor: AsyncCursor[Row], where: Where, keys: Iterable[str | None]) -> None:
    """Make the first of each key's queue its only head."""
    await cursor.execute(LINE_UP, {**where, "keys": list({key for key in keys if key is not None})})


async def wake(link: Link, outbox: str) -> None:
    """Let sleeping relays look at once."""
    async with link.autocommit() as cursor:
        await cursor.execute(_SQL["wake"], {"outbox": outbox})
