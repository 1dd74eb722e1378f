"""Subscriptions enter the store: rows for them and their cursors, made once, found again by every relay.

Everything about one subscription happens in one transaction that holds its row, so relays that start together agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncCursor, sql

from mailboat.errors import ForeignDatabase
from mailboat.outbox.composed import Route
from mailboat.outbox.filters import Since, predicate
from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Link, Row
from mailboat.outbox.repartition import repartition
from mailboat.outbox.sqlfiles import statements
from mailboat.outbox.store import Subscription
from mailboat_spec import EventSubscription, full_name

_SQL = statements("subscriptions")


@dataclass(frozen=True, slots=True)
class Declared:
    """A subscription as a manifest declares it."""

    name: str
    resource: EventSubscription

    @classmethod
    def of(cls, resource: EventSubscription) -> Declared:
        return cls(full_name(resource), resource)


async def declare(link: Link, layout: Layout, declared: Declared, *, may_lay_out: bool) -> Route:
    """The subscription's row and cursors, made if they are missing; changed where the manifest changed.

    ``may_lay_out``: a relay that just started brings another number of partitions with it; one that has been running
    follows what it finds, so that two relays with two versions of a manifest do not undo each other's work for ever.
    """
    spec = declared.resource.spec
    wanted: dict[str, Any] = {
        "outbox": layout.table,
        "name": declared.name,
        "uid": declared.resource.metadata.uid or "",
        "state": spec.state.value,
        "partitions": spec.partitions,
        "since_time": spec.start.time.isoformat() if spec.start.time else None,
        "since_id": spec.start.position,
    }
    async with link.transaction() as cursor:
        found = await _find(cursor, wanted)
        if found is not None and found[1] and wanted["uid"] and found[1] != wanted["uid"]:
            await cursor.execute(_SQL["forget"], wanted)  # a resource of the same name, made anew: it starts anew
            found = None
        if found is None:
            await cursor.execute(_SQL["declare"], wanted)
            found = await _find(cursor, wanted)
            assert found is not None
        number, uid, partitions, generation, state, since_time, since_id = found
        await cursor.execute(_SQL["redeclare"], {**wanted, "id": number, "uid": wanted["uid"] or uid})
        await cursor.execute(
            sql.SQL(_SQL["create_cursors"]).format(stored=layout.stored, outbox=layout.outbox),
            {
                "id": number,
                "partitions": partitions,
                "latest": spec.start.from_.value == "Latest",
                "system_identifier": link.server.system_identifier,
                "timeline": link.server.timeline,
            },
        )
        if partitions != spec.partitions and may_lay_out:
            generation = await repartition(cursor, layout, number, spec.partitions)
            partitions = spec.partitions
    subscription = Subscription(number, declared.name, partitions, generation, state == "Paused")
    return Route(subscription, predicate(spec.filter, Since(since_time, since_id)))


async def _find(cursor: AsyncCursor[Row], wanted: dict[str, Any]) -> Row | None:
    await cursor.execute(_SQL["find"], wanted)
    return await cursor.fetchone()


async def refuse_strangers(link: Link, numbers: list[int]) -> None:
    """Stops where the cursors were written in another database system: a person must say how to go on."""
    async with link.autocommit() as cursor:
        await cursor.execute(
            _SQL["strangers"], {"numbers": numbers, "system_identifier": link.server.system_identifier}
        )
        names = [row[0] for row in await cursor.fetchall()]
    if names:
        raise ForeignDatabase(
            f"the cursors of {', '.join(sorted(names))} were written in another database system; this one is a restored"
            " copy. If this copy is the one to go on with, run `mailboat rebase`: it continues behind the highest"
            " position that was settled."
        )
