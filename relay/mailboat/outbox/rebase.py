"""``mailboat rebase``: going on in a copy of the database (a restored dump), when a person says that it is the one.

Snapshots and transaction ids belong to the system they were taken in, so windows can't be continued elsewhere. What
can be is the highest id that each cursor settled: events behind it are delivered, by id. An event with a lower id
that had not been delivered in the old system, because its transaction committed late, is not: that is why it takes a
person.
"""

from __future__ import annotations

from psycopg import sql

from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Link
from mailboat.outbox.sqlfiles import statements

_SQL = statements("rebase")


async def rebase(link: Link, layout: Layout) -> int:
    """Makes the cursors of another system this system's own. Returns how many there were.

    Where there are none, nothing at all is touched: an event that is taken for a restored one counts as old, and
    whoever has not delivered it yet would never do so.
    """
    where = {
        "outbox": layout.table,
        "system_identifier": link.server.system_identifier,
        "timeline": link.server.timeline,
    }
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["cursors"], where)
        if not any(foreign for (foreign,) in await cursor.fetchall()):
            return 0
        link.take_time()  # every restored event is touched
        await cursor.execute(sql.SQL(_SQL["readopt"]).format(outbox=layout.outbox))
        await cursor.execute(sql.SQL(_SQL["span"]).format(rows=layout.rows))
        upto, highest = await cursor.fetchone() or (None, None)
        await cursor.execute(_SQL["rebase"], {**where, "upto": upto, "highest": highest or 0})
        rebased = len(await cursor.fetchall())
        await cursor.execute(_SQL["forget_relays"], where)
    return rebased
