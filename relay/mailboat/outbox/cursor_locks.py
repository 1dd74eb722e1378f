"""Locking all cursors of a subscription, against relays that settle them.

A tick settles cursors and opens windows for others, in whatever order they come up, and keeps all of them until it
commits. A tick is frequent and everybody's progress is in it, so it is the other side that gives way: it takes the
cursors in order, waits for each a moment only, and where that is not enough it lets go of all of them before it tries
again. So it never keeps a tick from a cursor for longer than that, and the server finds no deadlock to break.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import AsyncCursor

_PATIENCE = "100ms"
"""Far below the server's deadlock_timeout, which is a second unless somebody changed it."""


async def lock_cursors(
    cursor: AsyncCursor[tuple[Any, ...]], statement: str, where: Mapping[str, object]
) -> list[tuple[Any, ...]]:
    """The rows of a statement that locks cursors, held until the transaction ends."""
    await cursor.execute("select current_setting('lock_timeout')")
    (usual,) = await cursor.fetchone() or ("0",)
    while True:
        try:
            async with cursor.connection.transaction():
                await _wait_at_most(cursor, _PATIENCE)
                await cursor.execute(statement, where)
                rows = await cursor.fetchall()
                await _wait_at_most(cursor, usual)
                return rows
        except psycopg.errors.LockNotAvailable:
            continue


async def _wait_at_most(cursor: AsyncCursor[tuple[Any, ...]], patience: str) -> None:
    await cursor.execute("select set_config('lock_timeout', %s, true)", [patience])
