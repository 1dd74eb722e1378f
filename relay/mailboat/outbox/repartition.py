"""Changing the number of partitions of a live subscription, without waiting for anything to drain.

A drain would hang on a paused subscription or a dead sink. Instead, in one transaction, the old cursors are taken away,
which makes whatever their owners still have in hand void, and new ones take their place. Each new cursor carries the
vector of the old ones as its *debts*: its first window goes up to the present snapshot S, and of its events those are
done that the old cursor of their old partition had settled. Within a key the order is that of ids, so nothing
overtakes.

What they may have left undone can be a large part of the table, and to look through it takes its time. That is done
before, while everybody goes on (``undone``); the transaction that holds the cursors only looks at what has come since.
A relay's tick is one transaction for all subscriptions: whoever held these cursors for minutes would stop all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from psycopg import AsyncCursor, sql

from mailboat.outbox.cursor_locks import lock_cursors
from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Link, Row, Server, refuse_other_server
from mailboat.outbox.sqlfiles import statements

_SQL = statements("repartition")


@dataclass(frozen=True, slots=True)
class Undone:
    """Where events may lie that cursors had not settled, up to a snapshot; no ids: nowhere."""

    upto: str
    lowest: int | None
    highest: int | None

    def joined_by(self, later: Undone) -> Undone:
        """Both, up to the later snapshot. Cursors only move on, so what was undone earlier is a safe bound."""
        lowest = [each for each in (self.lowest, later.lowest) if each is not None]
        highest = [each for each in (self.highest, later.highest) if each is not None]
        return Undone(later.upto, min(lowest, default=None), max(highest, default=None))


async def undone(link: Link, layout: Layout, wanted: Mapping[str, object]) -> Undone | None:
    """What a subscription has not settled, if it is to be laid out anew; None: it is not."""
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["differs"], wanted)
        found = await cursor.fetchone()
        if found is None:
            return None
        link.take_time()  # what is not settled is looked through, however much it is
        await _refuse_other_server(cursor, link.server)
        return await _look(cursor, layout, "span", {"subscription": found[0]})


async def repartition(
    cursor: AsyncCursor[Row], layout: Layout, server: Server, subscription: int, partitions: int, before: Undone | None
) -> int:
    """Lays the subscription out anew and returns the new generation. Runs in the caller's transaction.

    ``before``: what was undone a moment ago; without it all of that is looked through now.
    """
    where = {"subscription": subscription, "partitions": partitions}
    old = [
        {"done": done, "upto": upto, "position": position, "debts": debts}
        for done, upto, position, debts in await lock_cursors(cursor, _SQL["fence"], where)
    ]
    if before is None:
        left = await _look(cursor, layout, "span", where)
    else:
        await _refuse_other_server(cursor, server)
        left = before.joined_by(await _look(cursor, layout, "span_since", {"since": before.upto}))
    debts = json.dumps({"partitions": len(old), "cursors": old})
    bounds = {"upto": left.upto, "lowest": left.lowest, "highest": left.highest, "debts": debts}
    await cursor.execute(_SQL["replace"], where | bounds)
    await cursor.execute(_SQL["move_parked"], where)
    await cursor.execute(_SQL["lay_out"], where)
    row = await cursor.fetchone()
    assert row is not None, "the caller holds the subscription's row"
    return int(row[0])


async def _look(cursor: AsyncCursor[Row], layout: Layout, name: str, where: Mapping[str, object]) -> Undone:
    await cursor.execute(sql.SQL(_SQL[name]).format(rows=layout.rows), where)
    row = await cursor.fetchone()
    assert row is not None, "an aggregate has a row"
    return Undone(*row)


async def _refuse_other_server(cursor: AsyncCursor[Row], server: Server) -> None:
    await cursor.execute(_SQL["server"])
    refuse_other_server(await cursor.fetchone(), server)
