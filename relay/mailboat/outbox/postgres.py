"""The outbox store in Postgres: which connection does what.

| connection | does                                                    | exists                          |
|------------|---------------------------------------------------------|---------------------------------|
| sentry     | the relay's liveness lock, LISTEN, heartbeats            | always                          |
| desk       | ticks, claims, releases, parked events, doorbell         | while partitions are owned      |
| reader     | large windows, backlog probes, in a thread              | from the first one on           |

So a relay that owns nothing holds one connection, and reading a large window never delays a settle or a heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

import psycopg
from psycopg import sql

from mailboat.errors import DatabaseUnavailable
from mailboat.outbox.composed import Compositions, Route
from mailboat.outbox.declaring import Declared, declare, refuse_strangers
from mailboat.outbox.layout import Layout
from mailboat.outbox.leases import Leases, RelayIdentity
from mailboat.outbox.link import Link, Row, UrlProvider, explained
from mailboat.outbox.parking import Parking
from mailboat.outbox.reading import ReadingThread, WindowReads
from mailboat.outbox.sqlfiles import statements
from mailboat.outbox.store import (
    Backlog,
    Chunk,
    Cursor,
    CursorKey,
    Lag,
    Lease,
    Parked,
    Roster,
    Settlement,
    Subscription,
    TickResult,
    TipGroup,
    Window,
)
from mailboat.outbox.windows import ReadLimits, Windows

_SQL = statements("subscriptions")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a relay uses its outbox."""

    layout: Layout = field(default_factory=Layout)
    durability: str = "Flushed"
    notify: str = "Auto"
    pooler: str = "Auto"
    lease_ttl: float = 60.0
    overdue_after: float = 3.0
    """Seconds without a heartbeat after which a relay whose liveness lock is free counts as dead."""
    deadline: float = 30.0
    """Seconds after which a statement without an answer means that the database is away."""
    limits: ReadLimits = field(default_factory=ReadLimits)
    lag_bound: int = 100_000


class PostgresStore:
    """One outbox in Postgres, as one relay sees it."""

    def __init__(self, url: UrlProvider, me: RelayIdentity, settings: StoreSettings, sentry: Link) -> None:
        self._url = url
        self._settings = settings
        self._sentry = sentry
        self._desk: Link | None = None
        self._thread = ReadingThread(url, sentry.server, settings.deadline)
        self._opening = asyncio.Lock()
        self._leases = Leases(me, settings.layout.table, settings.lease_ttl, settings.overdue_after)
        self._parking = Parking()
        self._compositions = Compositions(settings.layout)
        self._windows = Windows(self._compositions, settings.durability, settings.limits, self._parking)
        self._reads = WindowReads(self._thread, self._compositions, settings.limits)
        self._routes: dict[int, Route] = {}
        self._horizon = "3"
        self._listens = False

    @classmethod
    async def open(cls, url: UrlProvider, me: RelayIdentity, settings: StoreSettings) -> Self:
        """Connects one session. ``declare`` and ``join`` follow."""
        sentry = await Link.open(url, "sentry", deadline=settings.deadline, pooler=settings.pooler)
        return cls(url, me, settings, sentry)

    @property
    def rings(self) -> bool:
        """Whether writers may be asked to ring at all, on this server and with these settings."""
        server, notify = self._sentry.server, self._settings.notify
        return not server.pooled and (notify == "Always" or (notify == "Auto" and not server.prepared_transactions))

    async def declare(self, subscriptions: Sequence[Declared], *, may_lay_out: bool = True) -> dict[int, Subscription]:
        """Make the subscriptions known, and refuse cursors of another database system."""
        layout = self._settings.layout
        routes = [await declare(self._sentry, layout, d, may_lay_out=may_lay_out) for d in subscriptions]
        self._routes = {route.subscription.number: route for route in routes}
        self._compositions.route(self._routes)
        await refuse_strangers(self._sentry, list(self._routes))
        return {number: route.subscription for number, route in self._routes.items()}

    async def join(self) -> None:
        """Introduce this relay to the others."""
        await self._leases.join(self._sentry, list(self._routes))
        if self.rings:
            async with self._sentry.autocommit() as cursor:
                await cursor.execute("listen mailboat")
            self._listens = True
            await self._leases.ring(self._sentry, self._settings.notify == "Always")

    async def beat(self) -> Roster:
        numbers = list(self._routes)
        peers = await self._leases.beat(self._sentry, numbers)
        holdings = await self._leases.holdings(self._sentry, numbers)
        async with self._sentry.autocommit() as cursor:
            await cursor.execute(_SQL["states"], {"numbers": numbers})
            states = {row[0]: Subscription(*row) for row in await cursor.fetchall()}
            await cursor.execute(_SQL["due"], {"numbers": numbers})
            due = frozenset(CursorKey(*row) for row in await cursor.fetchall())
        return Roster(peers, holdings, states, due)

    async def rung(self, timeout: float) -> bool:
        if not self._listens:
            await asyncio.sleep(timeout)
            return False
        async with explained(self._sentry.connection, timeout + self._settings.deadline):
            async for _ in self._sentry.connection.notifies(timeout=timeout, stop_after=1):
                return True
        return False

    async def claim(self, keys: Collection[CursorKey]) -> list[Cursor]:
        return await self._leases.claim(await self._at_desk(), keys) if keys else []

    async def release(self, leases: Collection[Lease]) -> None:
        if leases:
            await self._leases.release(await self._at_desk(), leases)

    async def rest(self) -> None:
        """Nothing is owned: only the sentry stays connected."""
        async with self._opening:
            desk, self._desk = self._desk, None
        if desk is not None:
            await desk.close()
        await self._thread.close()

    async def tick(self, settlements: Sequence[Settlement], tips: Sequence[TipGroup]) -> TickResult:
        return await self._windows.tick(await self._at_desk(), settlements, tips)

    async def read(self, window: Window, members: Sequence[Lease], after: int) -> Chunk:
        return await self._reads.read(window, members, after)

    async def parked_keys(self, lease: Lease) -> tuple[set[str], int]:
        return await self._parking.keys(await self._at_desk(), lease)

    async def due(self, lease: Lease, limit: int) -> tuple[list[Parked], float | None]:
        return await self._parking.due(await self._at_desk(), lease, limit)

    async def queue(self, lease: Lease, key: str, limit: int) -> list[Parked]:
        return await self._parking.queue(await self._at_desk(), lease, key, limit)

    async def sleep(self) -> None:
        desk = await self._at_desk()
        if self._listens and self._settings.notify == "Auto":
            await self._leases.ring(desk, True)
        self._horizon = await self._leases.horizon(desk)

    async def awake(self) -> None:
        if self._listens and self._settings.notify == "Auto":
            await self._leases.ring(await self._at_desk(), False)

    async def undecided_writers(self) -> bool:
        return await self._leases.undecided(await self._at_desk(), self._horizon)

    async def assign(self, subscription: int, generation: int, owners: dict[int, str]) -> bool:
        """Write down an assignment from outside; False if a newer one is known."""
        return await self._leases.assign(self._sentry, subscription, generation, owners)

    async def backlog(self, subscription: int) -> Backlog:
        route, layout, bound = self._routes[subscription], self._settings.layout, self._settings.lag_bound
        statement = sql.SQL(_SQL["backlog"]).format(stored=layout.stored, outbox=layout.outbox, wanted=route.wanted)
        where = {"subscription": subscription, "partitions": route.subscription.partitions, "bound": bound}

        def probe(cursor: psycopg.Cursor[Row]) -> Backlog:
            lags = {partition: Lag(*rest) for partition, *rest in cursor.execute(statement, where).fetchall()}
            parked: dict[int, int] = dict(cursor.execute(_SQL["parked"], where).fetchall())
            (dead,) = cursor.execute(_SQL["dead"], where).fetchone() or (0,)
            return Backlog(lags, parked, dead)

        return await self._thread.transaction(probe)

    async def close(self, *, leave: bool) -> None:
        try:
            if leave:
                await self._leases.leave(self._sentry)
        finally:
            await self.rest()
            await self._sentry.close()

    async def _at_desk(self) -> Link:
        async with self._opening:
            if self._desk is None:
                self._desk = await self._connect("desk")
            return self._desk

    async def _connect(self, purpose: str) -> Link:
        link = await Link.open(self._url, purpose, deadline=self._settings.deadline, pooler=self._settings.pooler)
        if link.server.system_identifier != self._sentry.server.system_identifier or (
            link.server.timeline != self._sentry.server.timeline
        ):
            await link.close()
            raise DatabaseUnavailable("two connections reached two different servers: a failover is under way")
        return link
