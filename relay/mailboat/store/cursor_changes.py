"""Changes of all cursors at once: repartitioning of a subscription, and adoption of another database's cursors.

Repartitioning needs no drain, which would hang on a paused subscription or an unavailable sink. Instead, one
transaction replaces the old cursors by new ones, which invalidates the batches that previous owners have in flight.
Each new cursor stores the vector of the old cursors (``previous_layout``). Its first window ends at the current
snapshot S. In that window, an event counts as settled if the old cursor of its old partition had settled it. Within a
key, events are sent in the order of ids, so no event overtakes another.

Scanning the unsettled events may take minutes. ``unsettled_range`` scans before the transaction, while relays continue,
and the transaction that locks the cursors scans only newer events: a relay's tick is one transaction for all
subscriptions, so cursors locked for minutes would stop all of them.

A rebase follows a person's decision. A copy on the same server has the same system identifier and another database OID.
It counts as another database, because the original may still deliver.

Restored dump: snapshots and transaction ids are valid only in the system that created them. Each cursor continues after
the highest id it settled, in the order of ids. An event with a lower id is skipped if it was undelivered because its
transaction committed late. That is why a person must decide.

Same history under another system identifier, as after pg_upgrade: transaction ids continue, so cursors stay unchanged
and no event is skipped. This is verified: the cursor has the same meaning in both systems if the events below the end
of its snapshots were written by the transactions that their xid names, and new transactions get higher ids.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

import psycopg
from psycopg import AsyncCursor, sql

from mailboat.errors import ForeignDatabase
from mailboat.store.connection import PostgresConnection, Row, Server, first_row, refuse_other_server
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout

_REPARTITION = statements("repartition")
_REBASE = statements("rebase")
_LOCK_TIMEOUT = "100ms"
"""Far below the server's deadlock_timeout, which is one second by default."""


async def lock_cursors(cursor: AsyncCursor[Row], statement: str, where: Mapping[str, object]) -> list[Row]:
    """Run a statement that locks cursors in order and return its rows. The locks last until the transaction ends.

    A relay's tick locks cursors in no fixed order until it commits. Ticks carry the progress of all partitions, so this
    function yields to them: on a short lock time-out it releases all locks before it retries. A tick is never blocked
    for longer than the time-out, and no deadlock lasts until the server has to break it.
    """
    set_timeout = "select set_config('lock_timeout', %s, true)"
    usual = await first_row(cursor, "select current_setting('lock_timeout')")
    while True:
        try:
            async with cursor.connection.transaction():
                await cursor.execute(set_timeout, [_LOCK_TIMEOUT])
                await cursor.execute(statement, where)
                rows = await cursor.fetchall()
                await cursor.execute(set_timeout, usual)
                return rows
        except psycopg.errors.LockNotAvailable:
            continue


class UnsettledRange(NamedTuple):
    """Id range that contains all unsettled events up to a snapshot; without ids, there are none."""

    window_snapshot: str
    lowest: int | None
    highest: int | None


async def unsettled_range(
    link: PostgresConnection, layout: TableLayout, parameters: Mapping[str, object]
) -> UnsettledRange | None:
    """Return the unsettled range of a subscription that needs repartitioning; None if it needs none."""
    async with link.transaction() as cursor:
        found = await first_row(cursor, _REPARTITION["differs"], parameters)
        if found is None:
            return None
        link.take_time()  # all unsettled events are scanned, however many
        refuse_other_server(await first_row(cursor, _REPARTITION["server"]), link.server)
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

    ``before`` is the earlier ``unsettled_range``, a safe bound because cursors only advance. Without it, all unsettled
    events are scanned now.
    """
    where = {"subscription": subscription, "partitions": partitions}
    old = [progress for (progress,) in await lock_cursors(cursor, _REPARTITION["fence"], where)]
    if before is None:
        unsettled = await _query_range(cursor, layout, "span", where)
    else:
        refuse_other_server(await first_row(cursor, _REPARTITION["server"]), server)
        unsettled = await _query_range(cursor, layout, "span_since", before._asdict())
    previous_layout = json.dumps({"partitions": len(old), "cursors": old})
    await cursor.execute(_REPARTITION["replace"], {**where, **unsettled._asdict(), "previous_layout": previous_layout})
    await cursor.execute(_REPARTITION["move_parked"], where)
    row = await first_row(cursor, _REPARTITION["repartition"], where)
    assert row is not None, "the caller holds the subscription's row"
    return int(row[0])


async def _query_range(
    cursor: AsyncCursor[Row], layout: TableLayout, name: str, where: Mapping[str, object]
) -> UnsettledRange:
    row = await first_row(cursor, sql.SQL(_REPARTITION[name]).format(rows=layout.rows), where)
    assert row is not None, "an aggregate has a row"
    return UnsettledRange(*row)


async def rebase(link: PostgresConnection, layout: TableLayout, *, same_history: bool = False) -> int:
    """Adopt the cursors of another system and return their number.

    With ``same_history`` the cursors stay unchanged. Raise ``ForeignDatabase`` if this system does not continue their
    history. Without foreign cursors, change nothing: an event marked as restored counts as old, so a cursor that has
    not settled it would skip it.
    """
    server = link.server
    where = {"outbox": layout.table, "system_identifier": server.system_identifier, "timeline": server.timeline}
    async with link.transaction() as cursor:
        if not any(foreign for (foreign,) in await lock_cursors(cursor, _REBASE["cursors"], where)):
            return 0
        link.take_time()  # some events are checked for each cursor position, or every restored event is updated
        if same_history:
            await _refuse_other_history(cursor, layout, where)
            await cursor.execute(_REBASE["keep"], where)
        else:
            await cursor.execute(sql.SQL(_REBASE["reset_xids"]).format(outbox=layout.outbox))
            span = await first_row(cursor, sql.SQL(_REBASE["span"]).format(rows=layout.rows)) or (None, None)
            place = {"window_snapshot": span[0], "highest": span[1] or 0}
            await cursor.execute(_REBASE["rebase"], where | place)
        rebased = cursor.rowcount
        await cursor.execute(_REBASE["forget_relays"], where)
    return rebased


async def _refuse_other_history(cursor: AsyncCursor[Row], layout: TableLayout, where: Mapping[str, object]) -> None:
    names = {"outbox": layout.outbox, "id": layout.column("id"), "xid": layout.column("xid")}
    history = await first_row(cursor, sql.SQL(_REBASE["history"]).format(**names), where)
    systems, behind, checked, strange = history or (0, True, 0, 0)
    if systems > 1:
        why = f"the cursors were written in {systems} other systems"
    elif behind:
        why = "this server's transaction ids are behind those that the cursors refer to"
    elif strange:
        why = (
            f"of {checked} events that were examined, {strange} were not written by the transaction that their xid"
            " names: they were restored, copied or changed"
        )
    else:
        return
    raise ForeignDatabase(
        f"this database does not continue the history of its cursors: {why}. --same-history is for a server that"
        " pg_upgrade made of the old one. For a restored dump run `mailboat rebase --yes`."
    )
