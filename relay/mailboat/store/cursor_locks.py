"""Locks on all cursors of a subscription, in competition with the ticks of relays.

A tick settles some cursors and opens windows for others, in no fixed order, and holds their locks until it commits.
Ticks are frequent and carry the progress of all partitions, so the caller of this module must yield. It locks the
cursors in order with a short lock time-out. On a time-out it releases all of them before it retries. A tick is thus
never blocked for longer than the time-out, and no deadlock lasts until the server has to break it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import AsyncCursor

_LOCK_TIMEOUT = "100ms"
"""Far below the server's deadlock_timeout, which is one second by default."""


async def lock_cursors(
    cursor: AsyncCursor[tuple[Any, ...]], statement: str, where: Mapping[str, object]
) -> list[tuple[Any, ...]]:
    """Run a statement that locks cursors and return its rows. The locks are held until the transaction ends."""
    await cursor.execute("select current_setting('lock_timeout')")
    (usual,) = await cursor.fetchone() or ("0",)
    while True:
        try:
            async with cursor.connection.transaction():
                await _wait_at_most(cursor, _LOCK_TIMEOUT)
                await cursor.execute(statement, where)
                rows = await cursor.fetchall()
                await _wait_at_most(cursor, usual)
                return rows
        except psycopg.errors.LockNotAvailable:
            continue


async def _wait_at_most(cursor: AsyncCursor[tuple[Any, ...]], timeout: str) -> None:
    await cursor.execute("select set_config('lock_timeout', %s, true)", [timeout])
