"""Changing the number of partitions of a live subscription, without waiting for anything to drain.

A drain would hang on a paused subscription or a dead sink. Instead, in one transaction, the old cursors are taken away,
which makes whatever their owners still have in hand void, and new ones take their place. Each new cursor carries the
vector of the old ones as its *debts*: its first window goes up to the present snapshot S, and of its events those are
done that the old cursor of their old partition had settled. Within a key the order is that of ids, so nothing
overtakes.
"""

from __future__ import annotations

import json

from psycopg import AsyncCursor, sql

from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Row
from mailboat.outbox.sqlfiles import statements

_SQL = statements("repartition")


async def repartition(cursor: AsyncCursor[Row], layout: Layout, subscription: int, partitions: int) -> int:
    """Lays the subscription out anew and returns the new generation. Runs in the caller's transaction."""
    where = {"subscription": subscription, "partitions": partitions}
    await cursor.execute(_SQL["fence"], where)
    old = [
        {"done": done, "upto": upto, "position": position, "debts": debts}
        for done, upto, position, debts in await cursor.fetchall()
    ]
    await cursor.execute(sql.SQL(_SQL["span"]).format(outbox=layout.outbox), where)
    upto, lowest, highest = await cursor.fetchone() or (None, None, None)
    debts = json.dumps({"partitions": len(old), "cursors": old})
    await cursor.execute(_SQL["replace"], {**where, "upto": upto, "lowest": lowest, "highest": highest, "debts": debts})
    await cursor.execute(_SQL["move_parked"], where)
    await cursor.execute(_SQL["lay_out"], where)
    row = await cursor.fetchone()
    assert row is not None, "the caller holds the subscription's row"
    return int(row[0])
