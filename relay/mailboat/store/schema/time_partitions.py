"""Time partitions of an outbox: created ahead of time, dropped once no subscription needs them.

Neither may affect a writer (G10). A database function creates partitions. Dropping takes four steps. A relay may die
after any of them; the next relay continues there:

    decide      a short transaction: no subscription needs an event of the partition, and no transaction in flight has
                written to it (checked by a share lock with a very short time-out). A comment on the table marks it.
    detach      ALTER TABLE ... DETACH PARTITION ... CONCURRENTLY. Cancelled if a long transaction delays it. The
                partition is then *pending*: invisible to new statements, and finished later
    finish      ... FINALIZE, if a detach is pending
    drop        DROP of the detached table, which no statement on the outbox touches

A bare DROP of a partition would queue for a lock on the outbox behind any reader, and every insert would queue behind
the DROP.

The server's clock sorts events into partitions, so a partition is dropped only if it has ended by that clock. It may
jump ahead, so the partition must have ended by the caller's clock too (``RetentionClock`` of the maintenance).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, cast

import psycopg
from psycopg import sql

from mailboat.errors import SchemaMismatch
from mailboat.store.connection import explain
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout

_SQL = statements("time_partitions")
_MARK = "mailboat: expired, being dropped"
_NOT_NOW = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected)

Connection = psycopg.AsyncConnection[Any]


class TimePartition(NamedTuple):
    name: str
    lower: datetime
    upper: datetime
    pending: bool
    """A detach was started and not finished."""
    condemned: bool
    """Mailboat has decided to drop it."""
    bytes: int


@dataclass(frozen=True, slots=True)
class HardLimit:
    """Limit of ``retention.policy: Drop``, beyond which events are dropped even if undelivered."""

    older_than: datetime | None = None
    max_bytes: int | None = None


class Blocked(NamedTuple):
    """An expired partition that can't be dropped yet."""

    partition: str
    reason: str
    subscription: str | None = None

    def __str__(self) -> str:
        owner = f"subscription {self.subscription} " if self.subscription else ""
        return f"{self.partition}: {owner}{self.reason}"


class Lost(NamedTuple):
    """Undelivered events of a subscription dropped by a hard limit, counted before its filter."""

    partition: str
    subscription: str
    events: int
    at_least: bool
    """Counting stopped at a bound."""


@dataclass(slots=True)
class RetentionReport:
    dropped: tuple[str, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    lost: tuple[Lost, ...] = ()


async def server_time(connection: Connection) -> datetime:
    return cast(datetime, await _value(connection, "now"))


async def ensure_partitions(connection: Connection, outbox: str) -> int:
    """Create the missing partitions of the next 30 days and return their number. If none is missing, write nothing."""
    return cast("int | None", await _value(connection, "ensure", outbox=outbox)) or 0


async def days_ahead(connection: Connection, outbox: str) -> float | None:
    """Return the days from now that partitions cover without a gap; None for a plain table."""
    return cast("float | None", await _value(connection, "ahead", outbox=outbox))


async def _value(connection: Connection, name: str, **values: object) -> Any:
    """Return the only value of a statement that always returns one row."""
    try:
        cursor = await connection.execute(_SQL[name], values)
        row = await cursor.fetchone()
    except psycopg.Error as error:
        raise explain(error) from error
    assert row is not None, "a query without FROM, or an aggregate, has a row"
    return row[0]


def beyond(limit: HardLimit, partitions: Sequence[TimePartition], now: datetime) -> frozenset[str]:
    """Return the partitions that a hard limit drops: the oldest first, and never one that may still be written to."""
    over = [partition for partition in partitions if partition.upper <= now]
    given_up = {p.name for p in over if limit.older_than is not None and p.upper <= limit.older_than}
    if limit.max_bytes is not None:
        size = sum(partition.bytes for partition in partitions if partition.name not in given_up)
        for partition in sorted(over, key=lambda each: each.lower):
            if size <= limit.max_bytes:
                break
            if partition.name not in given_up:
                given_up.add(partition.name)
                size -= partition.bytes
    return frozenset(given_up)


@dataclass(slots=True)
class RetentionSweep:
    """One attempt to drop partitions that end before ``older_than`` and that every subscription has settled, and those
    over ``limit``. A partition that may still be written to, by ``now`` or by the server's time, is never dropped.

    The connection must be in autocommit mode and outside a transaction. Its user must own the outbox. No wait is longer
    than the given seconds. Unfinished work is in the report, and the next sweep retries it.
    """

    connection: Connection
    layout: TableLayout
    older_than: datetime
    _: KW_ONLY
    now: datetime
    limit: HardLimit = HardLimit()
    lock_wait: float = 0.1
    detach_wait: float = 5.0
    count_up_to: int = 100_000
    found: RetentionReport = field(default_factory=RetentionReport)
    outbox: str = field(init=False)
    """The name as quoted by Postgres, like the names of partitions and in the rows of subscriptions."""

    async def run(self) -> RetentionReport:
        connection, self.outbox = self.connection, self.layout.table
        if not connection.autocommit or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            raise ValueError("a sweep needs a connection in autocommit mode and outside of a transaction")
        try:
            registered = await self._rows("registered", outbox=self.outbox)
            if not registered:
                create = f"select mailboat.create_outbox('{self.outbox}');"
                raise SchemaMismatch(f"There is no outbox {self.outbox}. Make it: {create}")
            ((self.outbox,),) = registered
            await self._sweep()
        except psycopg.errors.InsufficientPrivilege as error:
            reason = f"the relay's user is not its owner ({error.diag.message_primary}): grant it the owner's role"
            self._block(self.layout.table, reason)
        except psycopg.Error as error:
            raise explain(error) from error
        return self.found

    async def _sweep(self) -> None:
        partitions = [TimePartition(*row) for row in await self._rows("partitions", outbox=self.outbox, mark=_MARK)]
        for partition in partitions:
            if not partition.pending:
                continue
            if not partition.condemned:
                reason = "another session's detach of it is unfinished: finish it with ALTER TABLE ... FINALIZE"
                return self._block(partition.name, reason)
            if not await self._remove(partition, "finish_detach"):
                return  # Postgres allows one pending detach at a time
        for (leftover,) in await self._rows("leftovers", outbox=self.outbox, mark=_MARK):
            await self._drop(leftover)
        now = min(self.now, await server_time(self.connection))
        given_up = beyond(self.limit, partitions, now)
        deadline = min(self.older_than, now)
        for partition in partitions:
            if partition.pending or not (partition.name in given_up or partition.upper <= deadline):
                continue
            if not await self._decide(partition, regardless=partition.name in given_up):
                continue
            if not await self._remove(partition, "detach"):
                return

    async def _decide(self, partition: TimePartition, *, regardless: bool) -> bool:
        """Return True if the partition may be dropped. Checked twice, the second time with writers locked out."""
        if not regardless and await self._held(partition):
            return False
        try:
            async with self._briefly():
                await self._execute("lock", partition=partition.name)
                if await self._rows("over", upper=partition.upper) != [(True,)]:
                    return False  # the clock was set back, or this is another server after a failover
                if regardless:
                    where = {"outbox": self.outbox, "lower": partition.lower, "upper": partition.upper}
                    for name, events in await self._rows("unsettled", **where, bound=self.count_up_to):
                        least = events > self.count_up_to
                        self.found.lost += (Lost(partition.name, name, min(events, self.count_up_to), least),)
                elif await self._held(partition):
                    return False
                await self._execute("mark", partition=partition.name)
        except _NOT_NOW:
            self._block(partition.name, "a transaction in flight has written to it, or it is being vacuumed")
            return False
        except psycopg.errors.UndefinedTable:
            return False  # another relay dropped it first
        return True

    async def _held(self, partition: TimePartition) -> bool:
        async with self.connection.transaction():
            await self._rows("by_index")
            holders = await self._rows("holders", outbox=self.outbox, lower=partition.lower, upper=partition.upper)
        self.found.blocked += tuple(Blocked(partition.name, reason, name) for name, reason in holders)
        return bool(holders)

    async def _remove(self, partition: TimePartition, how: str) -> bool:
        """Detach and drop a partition. Return False if it could not be detached."""
        # The time-out is on the client: behind a pooler, a time-out set in the session would outlive this call.
        try:
            async with asyncio.timeout(self.detach_wait):
                await self._execute(how, partition=partition.name)
        except (TimeoutError, *_NOT_NOW):
            self._block(partition.name, "a transaction that is still open has used the outbox; will be finished later")
            return False
        except psycopg.errors.UndefinedTable:
            return False  # another relay detached it first and is about to drop it
        except psycopg.errors.ObjectNotInPrerequisiteState:
            self._block(partition.name, "another relay is detaching it, or another partition")
            return False
        await self._drop(partition.name)
        return True

    async def _drop(self, name: str) -> None:
        try:
            async with self._briefly():
                await self._execute("drop", partition=name)
        except _NOT_NOW:
            self._block(name, "it is detached, and another session still reads it; it will be dropped later")
        except psycopg.errors.UndefinedTable:
            pass  # another relay dropped it first
        else:
            self.found.dropped += (name,)

    @asynccontextmanager
    async def _briefly(self) -> AsyncIterator[None]:
        async with self.connection.transaction():
            await self._rows("lock_timeout", milliseconds=f"{self.lock_wait * 1000:.0f}ms")
            yield

    def _block(self, partition: str, reason: str) -> None:
        self.found.blocked += (Blocked(partition, reason),)

    async def _rows(self, name: str, **values: object) -> list[Any]:
        statement = sql.SQL(_SQL[name]).format(outbox=sql.SQL(self.outbox), rows=self.layout.rows)
        cursor = await self.connection.execute(statement, values)
        return await cursor.fetchall()

    async def _execute(self, name: str, *, partition: str) -> None:
        statement = sql.SQL(_SQL[name]).format(
            outbox=sql.SQL(self.outbox), partition=sql.SQL(partition), mark=sql.Literal(_MARK)
        )
        # A plain cursor: behind a pooler, a session's cursor opens a transaction, in which no detach can run.
        await psycopg.AsyncCursor(self.connection).execute(statement)
