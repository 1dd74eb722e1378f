"""Subscriptions and relays as the database knows them: what is true even while no relay runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from mailboat.outbox.filters import TRUE, Predicate, Since, predicate
from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Link
from mailboat.outbox.migrate import Applied, Migration, known_migrations, pending
from mailboat.outbox.sqlfiles import statements
from mailboat_spec import EventSubscription, full_name

_SQL = statements("overview")
_SUBSCRIPTIONS = statements("subscriptions")
_SCHEMA = statements("schema")


@dataclass(frozen=True, slots=True)
class KnownSubscription:
    """A subscription that has cursors in the database."""

    number: int
    name: str
    state: str
    partitions: int
    since: Since
    paused_reason: str | None
    owned: int
    """Partitions that a living relay owns."""
    parked_error: str | None
    """The last error of an event that is parked."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for a subscription."""

    lag: int
    bounded: bool
    oldest_age: float | None
    parked: int
    dead: int


@dataclass(frozen=True, slots=True)
class KnownRelay:
    """A relay that is alive, and where it listens (empty: nowhere)."""

    id: str
    address: str


async def known_subscriptions(link: Link, outbox: str) -> list[KnownSubscription]:
    """All subscriptions of an outbox, those without a manifest too."""
    async with link.autocommit() as cursor:
        await cursor.execute(_SQL["subscriptions"], {"outbox": outbox})
        rows = await cursor.fetchall()
    return [
        KnownSubscription(number, name, state, partitions, Since(time, position), reason, owned, error)
        for number, name, state, partitions, time, position, reason, owned, error in rows
    ]


async def known_relays(link: Link, outbox: str) -> list[KnownRelay]:
    """The relays that are alive."""
    async with link.autocommit() as cursor:
        await cursor.execute(_SQL["relays"], {"outbox": outbox})
        return [KnownRelay(*row) for row in await cursor.fetchall()]


async def relays_serving(link: Link, outbox: str, name: str) -> list[str]:
    """The relays, alive, that have this subscription in their manifests: they would make it anew at once."""
    async with link.autocommit() as cursor:
        await cursor.execute(_SQL["serving"], {"outbox": outbox, "name": name})
        return [row[0] for row in await cursor.fetchall()]


async def waiting(
    link: Link,
    layout: Layout,
    known: KnownSubscription,
    manifests: Iterable[EventSubscription],
    *,
    bound: int = 100_000,
) -> Waiting:
    """A bounded probe, never a full count. Without a manifest the filter is not known, and all events count."""
    asking: dict[str, Any] = {"subscription": known.number, "partitions": known.partitions, "bound": bound}
    statement = sql.SQL(_SUBSCRIPTIONS["backlog"]).format(rows=layout.rows, wanted=_wanted(known, manifests))
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["frugally"])
        await cursor.execute(statement, asking)
        lags = await cursor.fetchall()
        await cursor.execute(_SUBSCRIPTIONS["parked"], asking)
        parked = sum(count for _, count in await cursor.fetchall())
        await cursor.execute(_SUBSCRIPTIONS["dead"], asking)
        (dead,) = await cursor.fetchone() or (0,)
    return Waiting(
        lag=sum(pending for _, pending, _, _ in lags),
        bounded=any(bounded for *_, bounded in lags),
        oldest_age=max((age for _, _, age, _ in lags if age is not None), default=None),
        parked=parked,
        dead=dead,
    )


def _wanted(known: KnownSubscription, manifests: Iterable[EventSubscription]) -> Predicate:
    for manifest in manifests:
        if full_name(manifest) == known.name:
            return predicate(manifest.spec.filter, known.since)
    return TRUE


async def set_state(link: Link, outbox: str, name: str, state: str, reason: str | None) -> bool:
    """Pause or resume; relays see it with their next heartbeat. False: there is no such subscription."""
    values = {"outbox": outbox, "name": name, "state": state, "reason": reason}
    async with link.transaction() as cursor:
        await cursor.execute(_SUBSCRIPTIONS["set_state"], values)
        return await cursor.fetchone() is not None


async def forget(link: Link, outbox: str, name: str) -> bool:
    """Delete a subscription with its cursors, parked events and dead letters. False: there is none."""
    async with link.transaction() as cursor:
        await cursor.execute(_SUBSCRIPTIONS["forget"], {"outbox": outbox, "name": name})
        return await cursor.fetchone() is not None


async def pending_migrations(link: Link) -> tuple[Migration, ...]:
    """What ``mailboat migrate`` would apply. Raises ``SchemaMismatch`` where the database's history is not ours."""
    async with link.autocommit() as cursor:
        await cursor.execute(_SCHEMA["facts"])
        _, ledger, *_ = await cursor.fetchone() or (False, False)
        applied = []
        if ledger:
            await cursor.execute(_SCHEMA["applied"])
            applied = [Applied(*row) for row in await cursor.fetchall()]
    return pending(known_migrations(), applied)
