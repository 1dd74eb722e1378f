"""Parked events and dead letters in Postgres. All writes are in a settlement's transaction, which locks the cursor."""

from dataclasses import asdict
from typing import Any

from psycopg import Cursor, sql

from mailboat.model import OutboxEvent
from mailboat.store.connection import Pipeline, PostgresConnection, Row
from mailboat.store.outbox_store import Dead, LastFailure, Lease, Park, Parked, Series, Settlement
from mailboat.store.queries import EVENT_COLUMNS
from mailboat.store.sql import statements
from mailboat.store.table import COLUMNS, ROW_BYTES

_SQL = statements("parked_rows")
QUEUE_ORDER = sql.SQL(_SQL["queue_order"])
"""Sending order of a key's parked events, for statements that need the head of a queue."""
SCHEDULE_HEADS = sql.SQL(_SQL["schedule_heads"]).format(queue_order=QUEUE_ORDER)
"""Statement that makes the first event of each key's queue its only head."""
SERIES = sql.SQL(_SQL["series"])
"""Two columns: partition and generation of a parked event's sequence number."""
_DUE = sql.SQL(_SQL["due"]).format(columns=COLUMNS, row_bytes=ROW_BYTES, series=SERIES)
_QUEUE = sql.SQL(_SQL["queue"]).format(columns=COLUMNS, row_bytes=ROW_BYTES, series=SERIES, queue_order=QUEUE_ORDER)

_ERROR_LIMIT = 4000
"""Characters stored of an error: enough to understand it, too few to fill a disk."""


def apply(pipeline: Pipeline, settlement: Settlement) -> None:
    """Apply the changes of a settlement to parked events and dead letters."""
    # One cursor per statement: in a pipeline, a reused cursor may return the result of its earlier statement.
    # No `executemany`: it opens a pipeline, which must not be used behind a pooler.
    key = settlement.lease.key
    where = key._asdict()
    for dead in settlement.dead:
        pipeline.send(_SQL["insert_dead_letter"], where | dead.event._asdict() | _columns(dead))
    touched: list[Cursor[Row]] = []
    unparked = [*settlement.unpark, *(d.ordinal for d in settlement.dead if d.ordinal is not None)]
    if unparked:
        touched.append(pipeline.send(_SQL["unpark"], {"subscription": key.subscription, "ordinals": unparked}))
    reparked = [park for park in settlement.park if park.ordinal is not None]
    touched += [pipeline.send(_SQL["repark"], where | _columns(park)) for park in reparked]
    new = [park for park in settlement.park if park.ordinal is None]
    keys = {park.event.key for park in new}
    if touched:
        pipeline.wait()
        keys.update(row[0] for each in touched for row in each.fetchall())
    for park in new:
        pipeline.send(_SQL["park"], where | park.event._asdict() | _columns(park))
    keys.update(settlement.arrange)
    keys.discard(None)
    if keys and settlement.ordered:
        pipeline.send(SCHEDULE_HEADS, {**where, "keys": list(keys)})
    elif settlement.arrange:
        pipeline.send(_SQL["schedule_all"], where)


async def keys(link: PostgresConnection, lease: Lease) -> tuple[set[str], int]:
    where = lease.key._asdict()
    rows = await link.fetch(_SQL["keys"], where)
    ((count,),) = await link.fetch(_SQL["count"], where)
    return {key for (key,) in rows}, count


async def due(link: PostgresConnection, lease: Lease, limit: int, max_bytes: int) -> tuple[list[Parked], float | None]:
    where = lease.key._asdict()
    heads = await link.fetch(_DUE, {**where, "limit": limit, "max_bytes": max_bytes})
    ((next_due,),) = await link.fetch(_SQL["next_due"], where)
    return [_parked(row) for row in heads], next_due


async def queue(link: PostgresConnection, lease: Lease, key: str, limit: int, max_bytes: int) -> list[Parked]:
    parameters = {**lease.key._asdict(), "key": key, "limit": limit, "max_bytes": max_bytes}
    return [_parked(row) for row in await link.fetch(_QUEUE, parameters)]


def _parked(row: Row) -> Parked:
    ordinal, sequence, partition, generation, *state, reason, error, first_failed_at = row[EVENT_COLUMNS:]
    event, series = OutboxEvent._make(row[:EVENT_COLUMNS]), Series(partition, generation)
    failure = LastFailure(reason, error or "") if reason is not None else None
    values: Row = (ordinal, event, sequence, series, *state, failure, first_failed_at)
    return Parked(*values)


def _columns(each: Park | Dead) -> dict[str, Any]:
    """Return the columns of a row except those of the event."""
    reason = each.failure and each.failure.reason
    error = each.failure and each.failure.error.replace("\x00", "\\0")[:_ERROR_LIMIT]
    return asdict(each) | {"reason": reason, "error": error}
