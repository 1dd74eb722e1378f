"""Subscriptions and relays as stored in the database, available even if no relay runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psycopg import sql

from mailboat.store.connection import PostgresConnection
from mailboat.store.routing import TRUE, Since, effective_filter, predicate
from mailboat.store.sql import statements
from mailboat.store.subscription_rows import GRACE
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, full_name

_SQL = statements("overview")
_SUBSCRIPTIONS = statements("subscription_rows")


@dataclass(frozen=True, slots=True)
class KnownSubscription:
    """A subscription that has cursors in the database."""

    number: int
    name: str
    state: str
    partitions: int
    since: Since
    paused_reason: str | None
    owners: dict[int, str]
    """Live relays that own partitions, by partition."""
    served: bool
    """Whether a live relay has the subscription in its manifests."""
    parked_error: str | None
    """The last error of a parked event."""
    parked_error_age: float | None
    kept_until: str | None = None
    """Deleted: time until which its progress is kept."""


@dataclass(frozen=True, slots=True)
class Waiting:
    lag: int
    bounded: bool
    oldest_age: float | None
    parked: int
    dead: int


async def known_subscriptions(link: PostgresConnection, outbox: str) -> list[KnownSubscription]:
    """Return all subscriptions of an outbox, including those without a manifest."""
    rows = await link.fetch(_SQL["subscriptions"], {"outbox": outbox, "grace": GRACE.total_seconds()})
    return [
        KnownSubscription(
            number, name, state, partitions, Since(time, position), reason, {int(n): owners[n] for n in owners}, *rest
        )
        for number, name, state, partitions, time, position, reason, owners, *rest in rows
    ]


async def relay_addresses(link: PostgresConnection, outbox: str) -> list[str]:
    """Return the addresses that live relays listen on, each once."""
    return [address for (address,) in await link.fetch(_SQL["addresses"], {"outbox": outbox})]


async def relays_serving(link: PostgresConnection, outbox: str, name: str) -> list[str]:
    """Return the live relays that serve this subscription. They would recreate it at once if it were deleted."""
    return [relay for (relay,) in await link.fetch(_SQL["serving"], {"outbox": outbox, "name": name})]


async def waiting(
    link: PostgresConnection,
    layout: TableLayout,
    subscription: KnownSubscription,
    manifests: Iterable[EventSubscription],
    *,
    bound: int = 100_000,
) -> Waiting:
    """Return the backlog of a subscription from a bounded probe instead of a full count.

    Without a manifest the filter is unknown, and all events count.
    """
    parameters: dict[str, object] = {
        "subscription": subscription.number,
        "partitions": subscription.partitions,
        "bound": bound,
        "epochs": [],
    }
    manifest = next((each for each in manifests if full_name(each) == subscription.name), None)
    wanted = predicate(effective_filter(subscription.name, manifest.spec), subscription.since) if manifest else TRUE
    statement = sql.SQL(_SUBSCRIPTIONS["backlog"]).format(rows=layout.rows, wanted=wanted)
    async with link.transaction() as cursor:
        await cursor.execute(_SQL["planner"])
        await cursor.execute(statement, parameters)
        lags = await cursor.fetchall()
        await cursor.execute(_SUBSCRIPTIONS["parked"], parameters)
        parked = sum(count for _, count in await cursor.fetchall())
        await cursor.execute(_SUBSCRIPTIONS["dead"], parameters)
        (dead,) = await cursor.fetchone() or (0,)
    return Waiting(
        lag=sum(pending for _, pending, _, _ in lags),
        bounded=any(bounded for *_, bounded in lags),
        oldest_age=max((age for _, _, age, _ in lags if age is not None), default=None),
        parked=parked,
        dead=dead,
    )


async def set_state(link: PostgresConnection, outbox: str, name: str, state: str, reason: str | None) -> bool:
    """Pause or resume a subscription. Relays apply the state at their next heartbeat. Return False if it is unknown."""
    values = {"outbox": outbox, "name": name, "state": state, "reason": reason}
    return bool(await link.fetch(_SUBSCRIPTIONS["set_state"], values))


async def forget(link: PostgresConnection, outbox: str, name: str) -> bool:
    """Delete a subscription with its cursors, parked events and dead letters. Return False if it does not exist."""
    return bool(await link.fetch(_SUBSCRIPTIONS["forget"], {"outbox": outbox, "name": name}))
