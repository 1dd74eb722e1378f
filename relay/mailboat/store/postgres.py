"""The outbox store in Postgres, and its connections.

| connection | use                                                     | open                            |
|------------|---------------------------------------------------------|---------------------------------|
| control    | the relay's liveness lock, LISTEN, heartbeats           | always                          |
| work       | ticks (in a thread), claims, parked events, wake-ups    | while partitions are owned      |
| read       | large windows, in a thread                              | from the first read on          |
| probe      | backlog probes, in a thread                             | from the first probe on         |
| measure    | the bounds of one large window each, in a thread        | during the measurement          |

A read of a large window never delays a settlement or a heartbeat. A probe reads tables that people may lock or purge:
it has its own connection, so that its delays and failures affect no other work.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Final, Self

from mailboat.errors import DatabaseUnavailable, MailboatError
from mailboat.store import parked_rows, subscription_rows
from mailboat.store.connection import PostgresConnection, UrlProvider
from mailboat.store.leases import Leases
from mailboat.store.outbox_store import (
    Backlog,
    Chunk,
    Cursor,
    CursorGroup,
    CursorKey,
    Lease,
    Measured,
    Membership,
    Parked,
    Settlement,
    Subscription,
    TickResult,
    Window,
)
from mailboat.store.queries import QueryCache, SubscriptionQuery
from mailboat.store.settings import RelayIdentity, StoreSettings
from mailboat.store.sql import statements
from mailboat.store.subscription_rows import UNCOUNTED, ConfigVersion
from mailboat.store.window_reads import WindowReads
from mailboat.store.windows import Windows
from mailboat_spec import EventSubscription, Notify

_WAKE_UPS = statements("leases")
_PLANNER = statements("windows")["planner"]
_PREPARE_AFTER = 5
"""Executions of a statement on the control after which it is prepared. No thread uses this connection, so the names of
prepared statements are free (see ``PostgresConnection.open``)."""
MEASUREMENTS_AT_ONCE: Final = 4
"""Enough that quick measurements do not wait behind a large one."""


class PostgresStore:
    def __init__(
        self, url: UrlProvider, me: RelayIdentity, settings: StoreSettings, control: PostgresConnection
    ) -> None:
        self._url = url
        self._me = me
        self._settings = settings
        self._control = control
        self._links: dict[str, PostgresConnection] = {}
        """Connections for work, reads and probes, by purpose."""
        self._open_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._measurements = asyncio.Semaphore(MEASUREMENTS_AT_ONCE)
        self._leases = Leases(me, settings)
        self._query_cache = QueryCache(settings.layout)
        self._windows = Windows(settings, self._query_cache)
        self._reads = WindowReads(self._query_cache, settings.limits)
        self._routes: dict[int, SubscriptionQuery] = {}
        """All subscriptions declared over this connection, including those that are no longer served."""
        self._serves: frozenset[int] = frozenset()
        self._horizon = "3"
        """Transaction id below which writers may not have seen the last request for wake-ups."""
        self._joined = False
        self._listens = False
        self._wakeup_requested = False

    @classmethod
    async def open(cls, url: UrlProvider, me: RelayIdentity, settings: StoreSettings) -> Self:
        """Connect one session. Callers then call ``declare`` and ``join``."""
        control = await _open(url, "control", settings, reads_windows=True)
        if not control.server.pooled:
            control.connection.prepare_threshold = _PREPARE_AFTER
        return cls(url, me, settings, control)

    @property
    def database(self) -> str:
        """Name of the database and identifier of its system, for people to recognise it by."""
        return f"{self._control.connection.info.dbname} (system {self._control.server.system_identifier})"

    async def declare(
        self,
        subscriptions: Sequence[EventSubscription],
        *,
        may_lay_out: bool = True,
        version: ConfigVersion = UNCOUNTED,
    ) -> dict[int, Subscription]:
        """Serve these subscriptions in addition to those already served.

        Raises ``ForeignDatabase`` for cursors of another database system. After ``join``, this uses a separate
        connection: repartitioning may take long and must not delay heartbeats.
        """
        layout, routes = self._settings.layout, {}
        async with await self._connect("declare") if self._joined else nullcontext(self._control) as link:
            for each in subscriptions:
                route = await subscription_rows.declare(link, layout, each, may_lay_out=may_lay_out, version=version)
                if route is not None:
                    routes[route.subscription.number] = route
            await subscription_rows.refuse_foreign_cursors(link, list(routes))
        if any(self._routes.get(number) != route for number, route in routes.items()):
            self._routes = self._routes | routes
            self._query_cache.route(self._routes)
        self._serves |= routes.keys()
        return {number: route.subscription for number, route in routes.items()}

    def withdraw(self, number: int) -> None:
        self._serves -= {number}

    async def owned_by_others(self, subscriptions: Sequence[EventSubscription], version: ConfigVersion) -> bool:
        outbox, me = self._settings.layout.table, self._me.id
        return await subscription_rows.owned_by_others(self._control, outbox, me, subscriptions, version)

    async def retire_removed(self, named: Collection[str], version: ConfigVersion) -> tuple[list[str], list[str]]:
        outbox, me = self._settings.layout.table, self._me.id
        return await subscription_rows.retire_removed(self._control, outbox, me, named, version)

    async def join(self) -> None:
        """Register this relay and reset its wake-ups."""
        await self._leases.join(self._control, list(self._serves))
        self._joined = True
        server, notify = self._control.server, self._settings.notify
        wanted = notify is Notify.ALWAYS or (notify is Notify.AUTO and not server.prepared_transactions)
        if wanted and not server.pooled:
            await self._control.listen("mailboat", self._settings.layout.table)
            self._listens = True
        # An earlier process of this name may have left wake-ups enabled.
        await self._leases.request_wakeup(self._control, self._listens and notify is Notify.ALWAYS)

    async def beat(self) -> Membership:
        delivered = [number for number in self._serves if not self._routes[number].pulled]
        return await self._leases.beat(self._control, self._serves, delivered)

    async def wait_for_notification(self, timeout: float) -> bool:
        if not self._listens:
            await asyncio.sleep(timeout)
            return False
        return await self._control.notified(timeout)

    async def claim(self, keys: Collection[CursorKey]) -> list[Cursor]:
        work = await self._link("work")
        await self._windows.store_unwritten(work)
        generations = {key: self._routes[key.subscription].subscription.generation for key in keys}
        return await self._leases.claim(work, generations)

    async def renew(self, leases: Collection[Lease]) -> list[Cursor]:
        work = await self._link("work")
        await self._windows.store_unwritten(work)
        return await self._leases.renew(work, leases)

    async def release(self, leases: Collection[Lease]) -> None:
        work = await self._link("work")
        await self._windows.store_unwritten(work)
        await self._leases.release(work, leases)

    async def close_unused(self) -> None:
        await self._close("work")
        await self._close("read")
        await self._close("probe", at_once=True)
        if self._wakeup_requested:
            await self._request_wakeup(self._control, False)

    async def tick(
        self, settlements: Sequence[Settlement], groups: Sequence[CursorGroup], measured: Sequence[Measured] = ()
    ) -> TickResult:
        return await self._windows.tick(await self._link("work"), settlements, groups, measured)

    async def measure(self, group: CursorGroup) -> Window | None:
        async with self._measurements, await self._connect("measure", reads_windows=True) as link:
            return await link.read(lambda pipeline: self._reads.measure(pipeline, group), no_deadline=True)

    async def read(self, window: Window, members: Sequence[Lease], after: int, *, crash_count: int = 0) -> Chunk:
        link = await self._link("read")
        return await link.read(
            lambda pipeline: self._reads.read(pipeline, window, members, after, crash_count=crash_count)
        )

    async def parked_keys(self, lease: Lease) -> tuple[set[str], int]:
        return await parked_rows.keys(await self._link("work"), lease)

    async def due(self, lease: Lease, limit: int, max_bytes: int) -> tuple[list[Parked], float | None]:
        return await parked_rows.due(await self._link("work"), lease, limit, max_bytes)

    async def queue(self, lease: Lease, key: str, limit: int, max_bytes: int) -> list[Parked]:
        return await parked_rows.queue(await self._link("work"), lease, key, limit, max_bytes)

    async def enable_wakeups(self) -> None:
        work = await self._link("work")
        if self._listens and self._settings.notify is Notify.AUTO:
            await self._request_wakeup(work, True)
        ((self._horizon,),) = await work.fetch(_WAKE_UPS["horizon"])

    async def disable_wakeups(self) -> None:
        if self._wakeup_requested:
            await self._request_wakeup(await self._link("work"), False)

    async def _request_wakeup(self, link: PostgresConnection, active: bool) -> None:
        await self._leases.request_wakeup(link, active)
        self._wakeup_requested = active

    async def undecided_writers(self) -> bool:
        work = await self._link("work")
        return await work.fetch(_WAKE_UPS["undecided"], {"horizon": self._horizon}) == [(True,)]

    async def assign(self, subscription: int, generation: int, owners: dict[int, str]) -> bool:
        """Store an assignment by the operator. Return False if a newer one is stored already."""
        return await self._leases.assign(self._control, subscription, generation, owners)

    async def backlog(self, subscription: int) -> Backlog:
        route, settings = self._routes[subscription], self._settings
        try:
            return await subscription_rows.probe_backlog(
                await self._link("probe"),
                settings.layout,
                subscription,
                route.subscription.partitions,
                route.wanted,
                bound=settings.lag_bound,
                epochs=self._leases.epochs(subscription),
                timeout=settings.deadline / 2,  # the server cancels the statements before the connection's deadline
            )
        except MailboatError:
            await self._close("probe")  # the next probe reconnects
            raise

    async def close(self, *, leave: bool) -> None:
        try:
            if leave:
                await self._leases.leave(self._control)
        finally:
            self._wakeup_requested = False  # deleted together with the relay's row
            await self.close_unused()
            await self._control.close()

    async def _link(self, purpose: str) -> PostgresConnection:
        """Return the connection of this purpose. Open it if there is none."""
        async with self._open_locks[purpose]:
            if purpose not in self._links:
                self._links[purpose] = await self._connect(purpose, reads_windows=True)
            return self._links[purpose]

    async def _close(self, purpose: str, *, at_once: bool = False) -> None:
        async with self._open_locks[purpose]:
            link = self._links.pop(purpose, None)
        if link is not None:
            await link.close(at_once=at_once)

    async def _connect(self, purpose: str, *, reads_windows: bool = False) -> PostgresConnection:
        link = await _open(self._url, purpose, self._settings, reads_windows=reads_windows)
        if link.server.identity != self._control.server.identity:
            await link.close()
            raise DatabaseUnavailable("two connections reached two different servers: a failover is under way")
        return link


async def _open(url: UrlProvider, purpose: str, settings: StoreSettings, *, reads_windows: bool) -> PostgresConnection:
    link = await PostgresConnection.open(
        url, purpose, deadline=settings.deadline, pooler=settings.pooler, waits_for_standbys=False
    )
    if reads_windows and not link.server.pooled:
        try:
            await link.fetch(_PLANNER)
        except BaseException:
            await link.close()
            raise
    return link
