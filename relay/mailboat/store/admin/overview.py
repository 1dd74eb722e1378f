"""Subscriptions and relays as stored in the database, available even if no relay runs."""

from collections.abc import Iterable
from dataclasses import dataclass

from mailboat.store.connection import PostgresConnection
from mailboat.store.outbox_store import Backlog
from mailboat.store.queries import TRUE, Since, effective_filter, predicate
from mailboat.store.sql import statements
from mailboat.store.subscription_rows import GRACE, probe_backlog
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
    return [address for (address,) in await link.fetch(_SQL["addresses"], {"outbox": outbox})]


async def relays_serving(link: PostgresConnection, outbox: str, name: str) -> list[str]:
    """Return the live relays that serve this subscription. They would recreate it at once if it were deleted."""
    return [relay for (relay,) in await link.fetch(_SQL["serving"], {"outbox": outbox, "name": name})]


async def backlog(
    link: PostgresConnection,
    layout: TableLayout,
    subscription: KnownSubscription,
    manifests: Iterable[EventSubscription],
) -> Backlog:
    """Return the backlog of a subscription. Without a manifest the filter is unknown, and all events count."""
    manifest = next((each for each in manifests if full_name(each) == subscription.name), None)
    wanted = predicate(effective_filter(subscription.name, manifest.spec), subscription.since) if manifest else TRUE
    return await probe_backlog(link, layout, subscription.number, subscription.partitions, wanted)


async def set_state(link: PostgresConnection, outbox: str, name: str, state: str, reason: str | None) -> bool:
    """Pause or resume a subscription. Relays apply the state at their next heartbeat. Return False if it is unknown."""
    values = {"outbox": outbox, "name": name, "state": state, "reason": reason}
    return bool(await link.fetch(_SUBSCRIPTIONS["set_state"], values))


async def forget(link: PostgresConnection, outbox: str, name: str) -> bool:
    """Delete a subscription with its cursors, parked events and dead letters. Return False if it does not exist."""
    return bool(await link.fetch(_SUBSCRIPTIONS["forget"], {"outbox": outbox, "name": name}))
