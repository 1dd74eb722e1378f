"""Examination of an outbox: its coverage by subscriptions, and the oldest snapshot of its database.

Coverage: events that no filter matches, and filters that match no event. A filter with a spelling mistake is valid, and
its events stay in the outbox without an error. Two bounded reads find both sides of the mistake.

Snapshots: while one is held, Postgres keeps former versions of all rows. Each settlement of a cursor leaves one, and
every access to the cursor passes those that are kept (``docs/windows.md``). A relay therefore reports who holds the
oldest snapshot, and for how long.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import Any, Final

from psycopg import sql

from mailboat.store.connection import PostgresConnection
from mailboat.store.queries import Since, any_of, effective_filter, predicate
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, full_name

_SQL = statements("examination")

NEWEST: Final = 1000
"""Number of events that are examined."""
_MOST_TYPES: Final = 5
OLD: Final = timedelta(minutes=15)
"""Age from which a snapshot is reported as a problem."""
_REMEDIES: Final = {
    "session": "If it is idle in transaction or forgotten, end it: select pg_terminate_backend({name})",
    "prepared transaction": "Commit or roll it back: rollback prepared {literal}",
    "replication slot": "If it is not used any more: select pg_drop_replication_slot({literal})",
}


@dataclass(frozen=True, slots=True)
class Coverage:
    unmatched: Mapping[str, int] = field(default_factory=dict)
    """Events by type, of the newest ones of the last day, that no subscription matches."""
    idle: tuple[str, ...] = ()
    """Subscriptions whose filter matched no event of the last day, though the outbox got some."""

    def remarks(self) -> list[str]:
        """Return a sentence per finding, with the remedy."""
        found = []
        if self.unmatched:
            types = ", ".join(f"{name} ({count})" for name, count in self.unmatched.items())
            found.append(
                f"events of the newest {NEWEST} that no subscription matches, by type: {types}. They are not delivered."
                " If they should be, change spec.filter of a subscription; `mailboat match TYPE` tests it"
            )
        found += [
            f"{name}: its filter matched no event of the last 24 hours, though the outbox got some. If it should have,"
            " change its spec.filter; `mailboat match TYPE` tests it"
            for name in self.idle
        ]
        return found


async def coverage(
    link: PostgresConnection, layout: TableLayout, subscriptions: Sequence[EventSubscription]
) -> Coverage:
    """Examine an outbox. ``subscriptions``: those of the caller's manifests for this outbox."""
    if not subscriptions:
        return Coverage()
    names = [full_name(each) for each in subscriptions]
    wanted = any_of([predicate(effective_filter(full_name(each), each.spec), Since()) for each in subscriptions])
    where: dict[str, Any] = {"outbox": layout.table, "names": names, "newest": NEWEST, "types": _MOST_TYPES}
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["planner"])
        await cursor.execute(sql.SQL(_SQL["unmatched"]).format(rows=layout.rows, wanted=wanted), where)
        unmatched = {str(kind): int(count) for kind, count in await cursor.fetchall()}
        await cursor.execute(sql.SQL(_SQL["idle"]).format(rows=layout.rows), where)
        idle = tuple(str(name) for (name,) in await cursor.fetchall())
    return Coverage(unmatched, idle)


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
        rows = await link.fetch(_SQL["snapshot_holder"])
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
