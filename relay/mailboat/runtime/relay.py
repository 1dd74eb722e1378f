"""A relay: the loop around its sessions, and what it tells about itself.

It starts with nothing but its manifests, and keeps trying whatever is away: a database that is not there yet, one that
goes, a schema somebody still has to migrate. Only a manifest that can never work ends it (``ConfigError``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from random import Random

from mailboat.errors import DatabaseUnavailable, ForeignDatabase, LeaseLost, MailboatError, SchemaMismatch
from mailboat.outbox.declaring import Declared
from mailboat.outbox.layout import Layout, renamed
from mailboat.outbox.leases import RelayIdentity
from mailboat.outbox.link import Link, UrlProvider
from mailboat.outbox.migrate import migrate
from mailboat.outbox.postgres import PostgresStore, StoreSettings
from mailboat.outbox.store import Lag
from mailboat.outbox.verify import verify_or_refuse
from mailboat.outbox.windows import ReadLimits
from mailboat.pump.points import Passing, unheard
from mailboat.pump.retry import Backoff, Outage
from mailboat.pump.rhythm import WakeSettings
from mailboat.pump.stream import Clock
from mailboat.runtime.janitor import Janitor
from mailboat.runtime.secrets import Secrets, database_url
from mailboat.runtime.session import Session, Timings, Totals
from mailboat.runtime.status import PartitionStatus, RelayState, RelayStatus, SubscriptionStatus
from mailboat.runtime.streams import StreamParts, build
from mailboat_spec import EventSubscription, OutboxRelay, full_name

log = logging.getLogger(__name__)

_RECONNECT = Backoff(initial=0.2, factor=2, ceiling=10.0, jitter=0.2)
_RATE_OVER = 10.0
"""Seconds over which rates are measured."""
_STALLED_AFTER = 90.0
_LONG_ENOUGH = 5.0
"""Seconds of connection after which the next outage is a new one, and the back-off begins anew."""


class Relay:
    """One OutboxRelay and its subscriptions, moved by this process."""

    def __init__(
        self,
        resource: OutboxRelay,
        subscriptions: Sequence[EventSubscription],
        *,
        secrets: Secrets,
        identity: RelayIdentity,
        timings: Timings | None = None,
        limits: ReadLimits | None = None,
        clock: Clock = time.monotonic,
        random: Random | None = None,
        passing: Passing = unheard,
    ) -> None:
        self.resource = resource
        self.name = full_name(resource)
        self._identity = identity
        self._url = database_url(resource, secrets)
        self._clock = clock
        self._random = random or Random()
        self._passing = passing
        self._parts: dict[str, StreamParts] = {full_name(s): build(s, secrets) for s in subscriptions}
        longest = max((parts.settings.timeout for parts in self._parts.values()), default=30.0)
        # A lease must outlast a whole delivery, with room for a few heartbeats that come late.
        self._timings = timings or Timings(lease_ttl=longest + 30.0)
        self._limits = limits or ReadLimits()
        self._totals = Totals()
        self._session: Session | None = None
        self._store: PostgresStore | None = None
        self._janitor: Janitor | None = None
        self._state = RelayState.CONNECTING
        self._message = "has not connected yet"
        self._schema_ready = False
        self._was_connected = False
        self._rates: dict[str, deque[tuple[float, int]]] = {name: deque() for name in self._parts}

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop; then finish what is in hand, settle, release."""
        outage = Outage(_RECONNECT)
        sampling = asyncio.ensure_future(self._sample_rates())
        try:
            while not stop.is_set():
                began = self._clock()
                try:
                    await self._connected(stop)
                except (DatabaseUnavailable, LeaseLost, SchemaMismatch, ForeignDatabase) as error:
                    if self._clock() - began > _LONG_ENOUGH:
                        outage = outage.recovered()
                    outage = outage.failed()
                    self._note(error)
                    await _sleep_unless(stop, outage.delay(self._random))
            self._state, self._message = RelayState.STOPPING, "stopped"
        finally:
            sampling.cancel()
            for parts in self._parts.values():
                await parts.sink.close()

    def _note(self, error: MailboatError) -> None:
        needs_a_person = isinstance(error, SchemaMismatch | ForeignDatabase)
        self._state = RelayState.FAILED if needs_a_person else RelayState.CONNECTING
        if str(error) != self._message:
            log.warning("Not connected: %s", error, extra={"relay": self.name})
        self._message = str(error)

    async def _connected(self, stop: asyncio.Event) -> None:
        """One session, from the first connection to its end."""
        url = self._url
        await self._prepare_schema(url)
        spec = self.resource.spec
        settings = StoreSettings(
            layout=Layout(spec.outbox.table, renamed(spec.outbox.columns)),
            durability=spec.outbox.durability.value,
            notify=spec.wake.notify.value,
            pooler=spec.database.pooler.value,
            lease_ttl=self._timings.lease_ttl,
            overdue_after=self._timings.overdue_after,
            deadline=self._timings.deadline,
            limits=self._limits,
        )
        store = await PostgresStore.open(url, self._identity, settings)
        orderly = False
        janitor = Janitor(url, settings.layout.table, spec.outbox.retention, settings.pooler)
        upkeep = asyncio.ensure_future(janitor.run())
        try:
            declared = [Declared.of(parts.resource) for parts in self._parts.values()]
            subscriptions = await store.declare(declared, may_lay_out=not self._was_connected)
            streams = {
                number: self._parts[subscription.name].stream(subscription, self._clock, self._random, self._passing)
                for number, subscription in subscriptions.items()
            }
            await store.join()
            session = Session(
                store,
                self._identity.id,
                streams,
                subscriptions,
                self._wake(),
                self._timings,
                self._totals,
                self._clock,
                self._passing,
            )
            self._session, self._store, self._janitor = session, store, janitor
            self._was_connected = True
            self._state, self._message = RelayState.RUNNING, ""
            log.info("Connected.", extra={"relay": self.name, "id": self._identity.id, "outbox": settings.layout.table})
            await session.run(stop)
            orderly = True
        finally:
            self._session = self._store = None
            upkeep.cancel()
            await _quietly_close(store, leave=orderly)

    async def _prepare_schema(self, url: UrlProvider) -> None:
        outbox = self.resource.spec.outbox
        link = await Link.open(
            url, "schema", deadline=self._timings.deadline, pooler=self.resource.spec.database.pooler.value
        )
        try:
            if outbox.manage_schema:
                report = await migrate(link.connection, outbox.table)
                if report.applied:
                    log.info("Schema migrated.", extra={"relay": self.name, "applied": list(report.applied)})
            else:
                await verify_or_refuse(link.connection, outbox.table, renamed(outbox.columns))
            self._schema_ready = True
        except MailboatError:
            self._schema_ready = False
            raise
        finally:
            await link.close()

    def _wake(self) -> WakeSettings:
        wake = self.resource.spec.wake
        return WakeSettings(wake.poll_interval.seconds, wake.idle_after, wake.max_idle_interval.seconds)

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        """An assignment from outside for one subscription. False if a newer one is known already."""
        session, store = self._session, self._store
        if session is None or store is None:
            raise DatabaseUnavailable("not connected to the database, where assignments are kept: try again")
        numbers = [number for number, stream in session.streams.items() if stream.name == name]
        if not numbers:
            raise LookupError(name)
        return await store.assign(numbers[0], generation, owners)

    # -- what it tells -----------------------------------------------------------------------------------------------

    def status(self) -> RelayStatus:
        """What is known now; asks nobody."""
        session = self._session
        janitor = self._janitor
        return RelayStatus(
            name=self.name,
            relay=self._identity.id,
            state=self._state,
            message=self._message,
            database_reachable=session is not None,
            schema_ready=self._schema_ready,
            outbox=self.resource.spec.outbox.table,
            partitions_ahead_days=janitor.upkeep.days_ahead if janitor else None,
            retention_blocked=janitor.upkeep.blocked if janitor else None,
            peers=tuple(p.id for p in session.roster.peers if p.alive) if session and session.roster else (),
            subscriptions=tuple(self._subscription(name) for name in self._parts),
            stalled=session is not None and self._clock() - session.keeper.ticked_at > _STALLED_AFTER,
        )

    def _subscription(self, name: str) -> SubscriptionStatus:
        parts, session = self._parts[name], self._session
        number = next((n for n, s in session.streams.items() if s.name == name), None) if session else None
        pumps = (
            {key.partition: owned.pump for key, owned in session.owned.items() if key.subscription == number}
            if session
            else {}
        )
        backlog = session.backlogs.get(number) if session and number is not None else None
        at_rest = session is not None and number is not None and session.at_rest(number)
        owned = []
        for partition, pump in sorted(pumps.items()):
            lag = backlog.partitions.get(partition, Lag(0, None)) if backlog and not at_rest else Lag(0, None)
            pending = max(lag.pending, pump.pending)
            owned.append(
                PartitionStatus(
                    partition,
                    pending,
                    lag.bounded,
                    lag.oldest_age if pending else None,
                    pump.parked.count,
                    pump.counters.delivered,
                    pump.counters.last_error,
                )
            )
        known = session.subscriptions.get(number) if session and number is not None else None
        stream = session.streams.get(number) if session and number is not None else None
        away = next((p.counters.away for p in pumps.values() if p.counters.away), None)
        trouble = away or (stream.trouble if stream else None)
        errors = (p.counters.last_error for p in pumps.values() if p.counters.last_error)
        return SubscriptionStatus(
            name=name,
            sink=parts.resource.spec.sink.kind,
            state="Paused" if known and known.paused else "Running",
            partitions=known.partitions if known else parts.resource.spec.partitions,
            lag=sum(p.lag for p in owned),
            lag_bounded=any(p.lag_bounded for p in owned),
            oldest_age=max((p.oldest_age for p in owned if p.oldest_age is not None), default=None),
            parked=sum(p.parked for p in owned),
            dead=backlog.dead if backlog else 0,
            published=self._delivered(name),
            refused=self._totals.refused[name] + sum(p.counters.refused for p in pumps.values()),
            rate=self._rate(name),
            sink_reachable=trouble is None,
            last_error=trouble or next(errors, self._totals.last_error.get(name)),
            owned=tuple(owned),
            owners={h.key.partition: h.owner for h in session.roster.holdings if h.key.subscription == number}
            if session and session.roster
            else {},
        )

    def _delivered(self, name: str) -> int:
        live = (
            (owned.pump for owned in self._session.owned.values() if owned.pump.stream.name == name)
            if self._session
            else ()
        )
        return self._totals.delivered[name] + sum(pump.counters.delivered for pump in live)

    async def _sample_rates(self) -> None:
        while True:
            now = self._clock()
            for name, samples in self._rates.items():
                samples.append((now, self._delivered(name)))
                while samples[0][0] < now - _RATE_OVER:
                    samples.popleft()
            await asyncio.sleep(1.0)

    def _rate(self, name: str) -> float:
        samples = self._rates[name]
        if len(samples) < 2 or samples[-1][0] == samples[0][0]:
            return 0.0
        return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])


async def _sleep_unless(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


async def _quietly_close(store: PostgresStore, *, leave: bool) -> None:
    try:
        await store.close(leave=leave)
    except MailboatError as error:
        log.debug("The connection ended badly: %s", error)
