"""Coverage of an outbox by its subscriptions: events that no filter matches, and filters that match no event.

A filter with a spelling mistake is valid, and its events stay in the outbox without an error. Two bounded reads find
both sides of the mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from mailboat.store.connection import PostgresConnection
from mailboat.store.queries import Since, any_of, effective_filter, predicate
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, full_name

_SQL = statements("coverage")

NEWEST: Final = 1000
"""Number of events that are examined."""
_MOST_TYPES: Final = 5


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
    filters = [effective_filter(full_name(each), each.spec) for each in subscriptions]
    wanted = any_of({number: predicate(each, Since()) for number, each in enumerate(filters)})
    where: dict[str, Any] = {"outbox": layout.table, "names": names, "newest": NEWEST, "types": _MOST_TYPES}
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["planner"])
        await cursor.execute(sql.SQL(_SQL["unmatched"]).format(rows=layout.rows, wanted=wanted), where)
        unmatched = {str(kind): int(count) for kind, count in await cursor.fetchall()}
        await cursor.execute(sql.SQL(_SQL["idle"]).format(rows=layout.rows), where)
        idle = tuple(str(name) for (name,) in await cursor.fetchall())
    return Coverage(unmatched, idle)
