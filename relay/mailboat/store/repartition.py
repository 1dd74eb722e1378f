"""Repartitioning of a live subscription without a drain.

A drain would hang on a paused subscription or an unavailable sink. Instead, one transaction replaces the old cursors by
new ones, which invalidates the batches that previous owners have in flight. Each new cursor stores the vector of the
old cursors (``previous_layout``). Its first window ends at the current snapshot S. In that window, an event counts as
settled if the old cursor of its old partition had settled it. Within a key, events are sent in the order of ids, so no
event overtakes another.

The unsettled events may span a large part of the table, and scanning it may take minutes. ``unsettled_range`` scans
before the transaction, while relays continue. The transaction that locks the cursors scans only newer events. A relay's
tick is one transaction for all subscriptions, so cursors locked for minutes would stop all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from psycopg import AsyncCursor, sql

from mailboat.store.connection import PostgresConnection, Row, Server, refuse_other_server
from mailboat.store.cursor_locks import lock_cursors
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout

_SQL = statements("repartition")


@dataclass(frozen=True, slots=True)
class UnsettledRange:
    """Id range that contains all unsettled events up to a snapshot; without ids, there are none."""

    window_snapshot: str
    lowest: int | None
    highest: int | None

    def joined_by(self, later: UnsettledRange) -> UnsettledRange:
        """Return the union, up to the later snapshot. Cursors only advance, so the earlier range is a safe bound."""
        lowest = [each for each in (self.lowest, later.lowest) if each is not None]
        highest = [each for each in (self.highest, later.highest) if each is not None]
        return UnsettledRange(later.window_snapshot, min(lowest, default=None), max(highest, default=None))


async def unsettled_range(
    link: PostgresConnection, layout: TableLayout, parameters: Mapping[str, object]
) -> UnsettledRange | None:
    """Return the unsettled range of a subscription that needs repartitioning; None if it needs none."""
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["differs"], parameters)
        found = await cursor.fetchone()
        if found is None:
            return None
        link.take_time()  # all unsettled events are scanned, however many
        await _refuse_other_server(cursor, link.server)
        return await _query_range(cursor, layout, "span", {"subscription": found[0]})


async def repartition(
    cursor: AsyncCursor[Row],
    layout: TableLayout,
    server: Server,
    subscription: int,
    partitions: int,
    before: UnsettledRange | None,
) -> int:
    """Repartition the subscription in the caller's transaction and return the new generation.

    ``before`` is the range that ``unsettled_range`` returned. Without it, all unsettled events are scanned now.
    """
    where = {"subscription": subscription, "partitions": partitions}
    old = [
        {
            "settled_snapshot": settled_snapshot,
            "window_snapshot": window_snapshot,
            "position": position,
            "previous_layout": previous_layout,
        }
        for settled_snapshot, window_snapshot, position, previous_layout in await lock_cursors(
            cursor, _SQL["fence"], where
        )
    ]
    if before is None:
        unsettled = await _query_range(cursor, layout, "span", where)
    else:
        await _refuse_other_server(cursor, server)
        unsettled = before.joined_by(
            await _query_range(cursor, layout, "span_since", {"since": before.window_snapshot})
        )
    previous_layout = json.dumps({"partitions": len(old), "cursors": old})
    bounds = {
        "window_snapshot": unsettled.window_snapshot,
        "lowest": unsettled.lowest,
        "highest": unsettled.highest,
        "previous_layout": previous_layout,
    }
    await cursor.execute(_SQL["replace"], where | bounds)
    await cursor.execute(_SQL["move_parked"], where)
    await cursor.execute(_SQL["repartition"], where)
    row = await cursor.fetchone()
    assert row is not None, "the caller holds the subscription's row"
    return int(row[0])


async def _query_range(
    cursor: AsyncCursor[Row], layout: TableLayout, name: str, where: Mapping[str, object]
) -> UnsettledRange:
    await cursor.execute(sql.SQL(_SQL[name]).format(rows=layout.rows), where)
    row = await cursor.fetchone()
    assert row is not None, "an aggregate has a row"
    return UnsettledRange(*row)


async def _refuse_other_server(cursor: AsyncCursor[Row], server: Server) -> None:
    await cursor.execute(_SQL["server"])
    refuse_other_server(await cursor.fetchone(), server)
