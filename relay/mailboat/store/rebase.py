"""``mailboat rebase``: adopt the cursors of another database, after a person's decision.

A copy on the same server has the same system identifier and another database OID. It counts as another database,
because the original may still deliver.

Restored dump: snapshots and transaction ids are valid only in the system that created them, so windows can't be
continued elsewhere. Each cursor continues after the highest id it settled, in the order of ids. If an event with a
lower id was undelivered in the old system because its transaction committed late, it is skipped. That is why a person
must decide.

Same history under another system identifier, as after pg_upgrade: transaction ids continue, so cursors stay unchanged
and no event is skipped. This is verified. A cursor counts events as settled whose transaction ids are below the end of
its snapshots. If those events were written by the transactions that their xid names, and new transactions get higher
ids, the cursor has the same meaning in both systems.
"""

from __future__ import annotations

from psycopg import sql

from mailboat.errors import ForeignDatabase
from mailboat.store.connection import PostgresConnection
from mailboat.store.cursor_locks import lock_cursors
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout

_SQL = statements("rebase")


async def rebase(link: PostgresConnection, layout: TableLayout) -> int:
    """Adopt the cursors of another system and return the number of rebased cursors.

    Without foreign cursors, change nothing: an event marked as restored counts as old, so a cursor that has not settled
    it would skip it.
    """
    where = _where(link, layout)
    async with link.transaction() as cursor:
        if not any(foreign for (foreign,) in await lock_cursors(cursor, _SQL["cursors"], where)):
            return 0
        link.take_time()  # every restored event is updated
        await cursor.execute(sql.SQL(_SQL["reset_xids"]).format(outbox=layout.outbox))
        await cursor.execute(sql.SQL(_SQL["span"]).format(rows=layout.rows))
        window_snapshot, highest = await cursor.fetchone() or (None, None)
        await cursor.execute(_SQL["rebase"], {**where, "window_snapshot": window_snapshot, "highest": highest or 0})
        rebased = len(await cursor.fetchall())
        await cursor.execute(_SQL["forget_relays"], where)
    return rebased


async def keep_history(link: PostgresConnection, layout: TableLayout) -> int:
    """Adopt the cursors of the system that this one was upgraded from, unchanged, and return their number.

    Raises ``ForeignDatabase`` if this system does not continue the history of the cursors.
    """
    where = _where(link, layout)
    async with link.transaction() as cursor:
        if not any(foreign for (foreign,) in await lock_cursors(cursor, _SQL["cursors"], where)):
            return 0
        link.take_time()  # some events are checked for each cursor position
        names = {"outbox": layout.outbox, "id": layout.column("id"), "xid": layout.column("xid")}
        await cursor.execute(sql.SQL(_SQL["history"]).format(**names), where)
        systems, behind, checked, strange = await cursor.fetchone() or (0, True, 0, 0)
        if systems > 1:
            raise _other_history(f"the cursors were written in {systems} other systems")
        if behind:
            raise _other_history("this server's transaction ids are behind those that the cursors refer to")
        if strange:
            raise _other_history(
                f"of {checked} events that were looked at, {strange} were not written by the transaction that their"
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


def _where(link: PostgresConnection, layout: TableLayout) -> dict[str, object]:
    server = link.server
    return {"outbox": layout.table, "system_identifier": server.system_identifier, "timeline": server.timeline}
