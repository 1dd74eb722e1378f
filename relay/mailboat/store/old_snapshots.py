"""The oldest snapshot of a database: while it is held, Postgres keeps former versions of all rows.

Each settlement of a cursor leaves a former version, and every access to the cursor passes those that are kept
(``docs/windows.md``). A relay therefore reports who holds the oldest snapshot, and for how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Final

from psycopg import sql

from mailboat.store.connection import PostgresConnection
from mailboat.store.sql import statements

_SQL = statements("old_snapshots")

OLD: Final = timedelta(minutes=15)
"""Age from which a snapshot is reported as a problem."""
_REMEDIES: Final = {
    "session": "If it is idle in transaction or forgotten, end it: select pg_terminate_backend({name})",
    "prepared transaction": "Commit or roll it back: rollback prepared {literal}",
    "replication slot": "If it is not used any more: select pg_drop_replication_slot({literal})",
}


@dataclass(frozen=True, slots=True)
class OldSnapshot:
    """The oldest snapshot and its holder. Without one, the age is zero."""

    age: timedelta = timedelta()
    warning: str = ""
    """Holder and remedy, if the snapshot is old. It names no age, so that it stays the same."""


class SnapshotWatch:
    """Queries for the oldest snapshot. Remembers when it first saw a holder whose start it may not read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: tuple[object, ...] = ()
        self._seen_at = 0.0

    async def oldest(self, link: PostgresConnection) -> OldSnapshot:
        rows = await link.fetch(_SQL["holder"])
        if not rows:
            return OldSnapshot()
        ((kind, name, description, since, now),) = rows
        if (kind, name) != self._seen:
            self._seen, self._seen_at = (kind, name), self._clock()
        seen_for = timedelta(seconds=self._clock() - self._seen_at)
        age = max(timedelta(), seen_for if since is None else now - since)
        if age < OLD:
            return OldSnapshot(age)
        begun = f"{(now - age).astimezone(UTC):%Y-%m-%d %H:%M} UTC" + (" or longer" if since is None else "")
        remedy = _REMEDIES[kind].format(name=name, literal=sql.Literal(name).as_string())
        return OldSnapshot(
            age,
            f"A snapshot is held since {begun}, by {description}. Postgres keeps the former versions of rows until it"
            f" ends, and delivery slows down. {remedy}",
        )
