"""Parked and dead events in Postgres. Writes happen only inside a settlement's transaction, which holds the cursor."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncCursor, sql

from mailboat.events import Event
from mailboat.outbox.layout import COLUMNS
from mailboat.outbox.link import Link, Row
from mailboat.outbox.routing import EVENT_COLUMNS
from mailboat.outbox.sqlfiles import statements
from mailboat.outbox.store import Failure, Lease, Parked, Settlement

_SQL = statements("parked")
_DUE = sql.SQL(_SQL["due"]).format(columns=COLUMNS)
_QUEUE = sql.SQL(_SQL["queue"]).format(columns=COLUMNS)

_ERROR_LIMIT = 4000
"""Characters of an error that are kept: enough to understand it, too few to fill a disk."""


class Parking:
    """The events that one relay's partitions have set aside."""

    async def apply(self, cursor: AsyncCursor[Row], settlement: Settlement) -> None:
        """Everything about parked and dead events that a settlement asks for."""
        key = settlement.lease.key
        where = {"subscription": key.subscription, "partition": key.partition}
        if settlement.dead:
            await cursor.executemany(
                _SQL["die"],
                [
                    where
                    | _event(d.event)
                    | _failure(d.failure)
                    | {"attempts": d.attempts, "sequence": d.sequence, "ordinal": d.ordinal}
                    for d in settlement.dead
                ],
            )
        keys: set[str | None] = {park.event.key for park in settlement.park}
        gone = [*settlement.unpark, *(d.ordinal for d in settlement.dead if d.ordinal is not None)]
        if gone:
            await cursor.execute(_SQL["unpark"], {"subscription": key.subscription, "ordinals": gone})
            keys.update(row[0] for row in await cursor.fetchall())
        for repark in settlement.repark:
            await cursor.execute(
                _SQL["repark"],
                where
                | _failure(repark.failure)
                | {
                    "attempts": repark.attempts,
                    "retry_in": repark.retry_in,
                    "blocked": repark.blocked,
                    "doomed": repark.doomed,
                    "ordinal": repark.ordinal,
                },
            )
            keys.update(row[0] for row in await cursor.fetchall())
        if settlement.park:
            await cursor.executemany(
                _SQL["park"],
                [
                    where
                    | _event(p.event)
                    | _failure(p.failure)
                    | {
                        "attempts": p.attempts,
                        "retry_in": p.retry_in,
                        "blocked": p.blocked,
                        "suspect": p.suspect,
                        "doomed": p.doomed,
                        "sequence": p.sequence,
                    }
                    for p in settlement.park
                ],
            )
        keys.discard(None)
        if keys and settlement.ordered:
            await cursor.execute(_SQL["line_up"], {**where, "keys": list(keys)})

    async def keys(self, link: Link, lease: Lease) -> tuple[set[str], int]:
        """The keys that nothing may pass, and the number of all parked events."""
        async with link.autocommit() as cursor:
            await cursor.execute(_SQL["keys"], lease.key._asdict())
            keys = {row[0] for row in await cursor.fetchall()}
            await cursor.execute(_SQL["count"], lease.key._asdict())
            row = await cursor.fetchone()
        return keys, row[0] if row else 0

    async def due(self, link: Link, lease: Lease, limit: int) -> tuple[list[Parked], float | None]:
        """Heads whose time has come, and the seconds until the next."""
        async with link.autocommit() as cursor:
            await cursor.execute(_DUE, {**lease.key._asdict(), "limit": limit})
            heads = [_parked(row) for row in await cursor.fetchall()]
            await cursor.execute(_SQL["next_due"], lease.key._asdict())
            row = await cursor.fetchone()
        return heads, row[0] if row else None

    async def queue(self, link: Link, lease: Lease, key: str, limit: int) -> list[Parked]:
        """A key's parked events in the order of sending."""
        async with link.autocommit() as cursor:
            await cursor.execute(_QUEUE, {**lease.key._asdict(), "key": key, "limit": limit})
            return [_parked(row) for row in await cursor.fetchall()]


def _parked(row: Row) -> Parked:
    *counted, reason, error, first_failed_at = row[EVENT_COLUMNS:]
    ordinal, sequence, attempts, replay, suspect, blocked, doomed = counted
    return Parked(
        ordinal,
        Event._make(row[:EVENT_COLUMNS]),
        sequence,
        attempts,
        replay,
        suspect,
        blocked,
        doomed,
        Failure(reason, error or "") if reason is not None else None,
        first_failed_at,
    )


def _event(event: Event) -> dict[str, Any]:
    return event._asdict()


def _failure(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {"reason": None, "error": None}
    return {"reason": failure.reason, "error": failure.error.replace("\x00", "\\0")[:_ERROR_LIMIT]}
