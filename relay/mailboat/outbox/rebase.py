"""``mailboat rebase``: going on in another database system, when a person says that it is the one.

A restored dump: snapshots and transaction ids belong to the system they were taken in, so windows can't be continued
elsewhere. What can be is the highest id that each cursor settled: events behind it are delivered, by id. An event with
a lower id that had not been delivered in the old system, because its transaction committed late, is not: that is why it
takes a person.

The same history under another system identifier, which is what pg_upgrade makes: transaction ids go on where they
were, so cursors stay as they are and nothing is skipped. Whether that is so can be checked, and is: what a cursor takes
for settled are events with lower transaction ids than its snapshots end with. If those events were written by the very
transactions that they name, and new transactions get higher ids, the cursor means here what it meant there.
"""

from __future__ import annotations

from psycopg import sql

from mailboat.errors import ForeignDatabase
from mailboat.outbox.cursor_locks import lock_cursors
from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Link
from mailboat.outbox.sqlfiles import statements

_SQL = statements("rebase")


async def rebase(link: Link, layout: Layout) -> int:
    """Makes the cursors of another system this system's own. Returns how many there were.

    Where there are none, nothing at all is touched: an event that is taken for a restored one counts as old, and
    whoever has not delivered it yet would never do so.
    """
    where = _where(link, layout)
    async with link.transaction() as cursor:
        if not any(foreign for (foreign,) in await lock_cursors(cursor, _SQL["cursors"], where)):
            return 0
        link.take_time()  # every restored event is touched
        await cursor.execute(sql.SQL(_SQL["readopt"]).format(outbox=layout.outbox))
        await cursor.execute(sql.SQL(_SQL["span"]).format(rows=layout.rows))
        upto, highest = await cursor.fetchone() or (None, None)
        await cursor.execute(_SQL["rebase"], {**where, "upto": upto, "highest": highest or 0})
        rebased = len(await cursor.fetchall())
        await cursor.execute(_SQL["forget_relays"], where)
    return rebased


async def keep_history(link: Link, layout: Layout) -> int:
    """Makes the cursors of the system that this one was upgraded from its own, unchanged. Returns how many there were.

    Raises ``ForeignDatabase`` if this system does not continue the history that the cursors belong to.
    """
    where = _where(link, layout)
    async with link.transaction() as cursor:
        if not any(foreign for (foreign,) in await lock_cursors(cursor, _SQL["cursors"], where)):
            return 0
        link.take_time()  # some events are looked at for each place that a cursor stands at
        names = {"outbox": layout.outbox, "id": layout.column("id"), "xid": layout.column("xid")}
        await cursor.execute(sql.SQL(_SQL["history"]).format(**names), where)
        systems, behind, looked_at, strange = await cursor.fetchone() or (0, True, 0, 0)
        if systems > 1:
            raise _other_history(f"the cursors were written in {systems} other systems")
        if behind:
            raise _other_history("this server's transaction ids are behind those that the cursors refer to")
        if strange:
            raise _other_history(
                f"of {looked_at} events that were looked at, {strange} were not written by the transaction that their"
                " xid names: they were restored, copied or changed"
            )
        await cursor.execute(_SQL["keep"], where)
        kept = len(await cursor.fetchall())
        await cursor.execute(_SQL["forget_relays"], where)
    return kept


def _other_history(why: str) -> ForeignDatabase:
    return ForeignDatabase(
        f"this database does not continue the history of its cursors: {why}. --same-history is for a server that"
        " pg_upgrade made of the old one. For a restored dump run `mailboat rebase --yes`."
    )


def _where(link: Link, layout: Layout) -> dict[str, object]:
    server = link.server
    return {"outbox": layout.table, "system_identifier": server.system_identifier, "timeline": server.timeline}
