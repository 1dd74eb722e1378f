"""A relay: the loop around its sessions, and what it tells about itself.

It starts with nothing but its configuration, and keeps trying whatever is away: a database that is not there yet, one
that goes, a schema somebody still has to migrate. Only a manifest that can never work ends it (``ConfigError``), and
not even that where the configuration is *followed*: then somebody can mend it without a restart.

One connection carries one session. A new configuration or a changed secret is taken up while it runs (`changeover`):
only the subscriptions that changed finish their batches and begin anew. Where the way to the database changed, the
session ends in good order and another connection follows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from random import Random

from mailboat.errors import ConfigError, DatabaseUnavailable, ForeignDatabase, LeaseLost, MailboatError, SchemaMismatch
from mailboat.outbox.declaring import UNCOUNTED, Declared, Edition
from mailboat.outbox.postgres import PostgresStore
from mailboat.outbox.settings import ReadLimits, RelayIdentity
from mailboat.outbox.store import Subscription
from mailboat.pump.points import Passing, unheard
from mailboat.pump.retry import Backoff, Outage
from mailboat.pump.rhythm import WakeSettings
from mailboat.pump.stream import Clock, Stream
from mailboat.runtime.beforehand import Schema, ToldToStop, unless
from mailboat.runtime.changeover import Changeover, close_all
from mailboat.runtime.connection import Connection
from mailboat.runtime.followed import Configuration
from mailboat.runtime.janitor import Janitor, RetentionClock
from mailboat.runtime.lineup import Lineup, line_up, line_up_again, needs_secrets_anew
from mailboat.runtime.rates import Rates
from mailboat.runtime.reasons import reason_for
from mailboat.runtime.reporting import delivered, failed_status, stalled, subscription_status
from mailboat.runtime.secrets import Secrets, database_url
from mailboat.runtime.session import Session, Timings, Totals
from mailboat.runtime.status import RelayState, RelayStatus, SubscriptionStatus
from mailboat.runtime.streams import StreamParts
from mailboat.sinks.protocol import Sink
from mailboat_spec import EventSubscription, OutboxRelay, Reason, full_name

log = logging.getLogger(__name__)

_RECONNECT = Backoff(initial=0.2, factor=2, ceiling=10.0, jitter=0.2)
_LONG_ENOUGH = 5.0
"""Seconds of connection after which the next outage is a new one, and the back-off begins anew."""
_COURTESY = 10.0
"""Seconds for which other relays, which get the same configuration, may finish before partitions are laid out anew."""
_LOOK_AGAIN = 0.05
_FAREWELL_EVERY = 1.0


class Relay:
    """One OutboxRelay and its subscriptions, moved by this process."""

    def __init__(
        self,
        resource: OutboxRelay,
        subscriptions: Sequence[EventSubscription],
        *,
        secrets: Secrets,
        identity: RelayIdentity,
        version: int | None = None,
        follows: bool = False,
        timings: Timings | None = None,
        limits: ReadLimits | None = None,
        clock: Clock = time.monotonic,
        random: Random | None = None,
        passing: Passing = unheard,
    ) -> None:
        """``follows``: the configuration may change and be mended while it runs, so nothing in it ends the relay."""
        self.name = full_name(resource)
        self._config = Configuration(resource, tuple(subscriptions), version)
        self._next: Configuration | None = None
        self._follows = follows
        self._secrets = secrets
        self._identity = identity
        self._clock = clock
        self._random = random or Random()
        self._passing = passing
        self._lineup = line_up_again(subscriptions, secrets, Lineup()) if follows else line_up(subscriptions, secrets)
        self._own_timings = timings
        self._limits = limits or ReadLimits()
        self._totals = Totals()
        self._stir = asyncio.Event()
        """There is news for the session, or for who waits for the next one; or it is time to stop."""
        self._connection: Connection | None = None
        self._session: Session | None = None
        self._serving = False
        """Whether the session runs: between one and the next it is the last one that is told about."""
        self._store: PostgresStore | None = None
        self._unused: list[Sink] = []
        """Sinks that only what is leaving the session still uses."""
        self._janitor: Janitor | None = None
        self._retention_clock = RetentionClock()
        self._state = RelayState.CONNECTING
        self._message = "has not connected yet"
        self._reason: Reason | None = Reason.STARTING
        self._schema = Schema(self.name, self._waits)
        self._was_connected = False
        self._may_lay_out = True
        """Only who brings news changes the number of partitions (see ``declaring``)."""
        self._rates = Rates()

    # -- news --------------------------------------------------------------------------------------------------------

    def reconfigure(self, config: Configuration) -> None:
        """Another configuration for the same OutboxRelay: taken up as soon as the batches in hand are settled."""
        if self._next is None and _effect(config) == _effect(self._config):
            self._config = config  # it says something new about pods, and nothing about events
            return
        self._next = config
        self._stir.set()

    def refresh(self) -> None:
        """Secrets may have changed: those in use are taken up anew."""
        if self._session is None:
            self._stir.set()  # try again now: perhaps it was the password
        elif self._wanted_connection() != self._connection or needs_secrets_anew(self._lineup, self._secrets):
            log.info("A secret has changed.", extra={"relay": self.name})
            self._stir.set()

    @property
    def _wanted(self) -> Configuration:
        return self._next or self._config

    def _take_up(self, stop: asyncio.Event) -> list[Sink]:
        """What is wanted by now becomes what is. Returns the sinks that are not needed for it any more."""
        if not stop.is_set():
            self._stir.clear()
        before = self._lineup
        if self._next is not None:
            self._config, self._next = self._next, None
            self._may_lay_out = True
        if self._follows or self._was_connected or needs_secrets_anew(before, self._secrets):
            self._lineup = line_up_again(self._config.subscriptions, self._secrets, before)
        return before.replaced_by(self._lineup)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop; then finish what is in hand, settle, release."""
        outage = Outage(_RECONNECT)
        sampling = asyncio.ensure_future(self._sample_rates())
        stopping = asyncio.ensure_future(self._stir_on(stop))
        try:
            while not stop.is_set():
                began = self._clock()
                try:
                    await close_all(self._take_up(stop))
                    await self._connected(stop)
                    outage = outage.recovered()
                except ToldToStop:
                    break
                except (DatabaseUnavailable, LeaseLost, SchemaMismatch, ForeignDatabase, ConfigError) as error:
                    if isinstance(error, ConfigError) and not (self._follows or self._was_connected):
                        raise
                    if self._clock() - began > _LONG_ENOUGH:
                        outage = outage.recovered()
                    outage = outage.failed()
                    self._note(error)
                    await _wait(self._stir, outage.delay(self._random))
            self._state, self._message, self._reason = RelayState.STOPPING, "stopped", None
        finally:
            sampling.cancel()
            stopping.cancel()
            await close_all(parts.sink for parts in self._lineup.parts.values())

    async def _stir_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stir.set()

    def _note(self, error: MailboatError) -> None:
        needs_a_person = isinstance(error, SchemaMismatch | ForeignDatabase | ConfigError)
        self._state = RelayState.FAILED if needs_a_person else RelayState.CONNECTING
        if str(error) != self._message:
            log.warning("Not connected: %s", error, extra={"relay": self.name})
        self._message, self._reason = str(error), reason_for(error)

    async def _connected(self, stop: asyncio.Event) -> None:
        """One connection, and the session on it."""
        wanted = self._wanted_connection()
        read_url = database_url(self._config.relay, self._secrets)

        def url() -> str:
            try:
                return read_url()
            except ConfigError:  # the secret vanished: what is there goes on with what it has
                return wanted.url

        schema = self._schema
        await unless(stop, schema.prepare(url, self._config.relay.spec, wanted.settings.deadline), schema.in_the_middle)
        store = await unless(stop, PostgresStore.open(url, self._identity, wanted.settings))
        orderly = False
        layout, pooler = wanted.settings.layout, wanted.settings.pooler
        janitor = Janitor(url, layout, wanted.retention, pooler, self._retention_clock)
        upkeep = asyncio.ensure_future(janitor.run())
        try:
            self._janitor, self._connection = janitor, wanted
            await self._serve(store, stop)
            orderly = True
        except ToldToStop:
            orderly = True
            raise
        finally:
            self._session = self._store = self._connection = None
            upkeep.cancel()
            unused, self._unused = self._unused, []
            await close_all(unused)
            await _quietly_close(store, leave=orderly)
            await asyncio.wait({upkeep}, timeout=_LONG_ENOUGH)

    async def _serve(self, store: PostgresStore, stop: asyncio.Event) -> None:
        """One session, from its declaration to its end."""
        timings = self._timings(self._config)
        subscriptions = await unless(stop, self._declare(store))
        streams = {
            number: self._stream(self._lineup.parts[subscription.name], subscription)
            for number, subscription in subscriptions.items()
        }
        await unless(stop, store.join())
        session = Session(
            store,
            self._identity.id,
            streams,
            subscriptions,
            self._wake(),
            timings,
            self._totals,
            self._clock,
            self._passing,
        )
        self._session, self._store = session, store
        self._state, self._message, self._reason = RelayState.RUNNING, "", None
        self._was_connected = True
        log.info("Connected.", extra=self._about)
        ends = asyncio.Event()
        changeover = Changeover(store, session, self._lineup, self._stream)
        try:
            self._serving = True
            await session.run(ends, self._take_up_news(store, session, changeover, stop, ends))
        finally:
            self._serving = False

    async def _take_up_news(
        self,
        store: PostgresStore,
        session: Session,
        changeover: Changeover,
        stop: asyncio.Event,
        ends: asyncio.Event,
    ) -> None:
        """Whatever is wanted anew while a session runs; ends the session where that takes another connection."""
        farewell = asyncio.ensure_future(self._say_farewell(store, changeover.leaving))
        try:
            while True:
                await _either(self._stir, changeover.left)
                if stop.is_set() or self._wanted_connection() != self._connection:
                    if not stop.is_set():
                        log.info("The way to the database has changed: connecting anew.", extra=self._about)
                    ends.set()
                    return
                farewell.cancel()
                changeover.left.clear()
                self._unused += self._take_up(stop)
                for leases in (store, session):  # a lease must outlast the longest delivery
                    leases.extend_leases(self._timings(self._config).lease_ttl)
                changeover.dismiss(self._lineup, lambda each: self._let_others_finish(store, [each]))
                await changeover.declare(self._lineup, self._edition, may_lay_out=self._may_lay_out)
                self._may_lay_out = changeover.under_way
                session.keeper.poll_by(self._wake())
                idle = [sink for sink in self._unused if not changeover.uses(sink)]
                self._unused = [sink for sink in self._unused if changeover.uses(sink)]
                await close_all(idle)
                if not changeover.under_way:
                    log.info("The new configuration is in use.", extra=self._about)
                farewell = asyncio.ensure_future(self._say_farewell(store, changeover.leaving))
        finally:
            farewell.cancel()
            changeover.stop()

    @property
    def _about(self) -> dict[str, str]:
        return {"relay": self.name, "id": self._identity.id, "outbox": self._config.relay.spec.outbox.table}

    @property
    def _edition(self) -> Edition:
        return Edition(self._config.version or 0, self._config.relay.metadata.uid) if self._follows else UNCOUNTED

    def _stream(self, parts: StreamParts, subscription: Subscription) -> Stream:
        return parts.stream(subscription, self._clock, self._random, self._passing)

    async def _declare(self, store: PostgresStore) -> dict[int, Subscription]:
        declared = [Declared.of(each.resource) for each in self._lineup.parts.values()]
        if self._may_lay_out and self._was_connected:
            await self._let_others_finish(store, declared)
        subscriptions = await store.declare(declared, may_lay_out=self._may_lay_out, edition=self._edition)
        self._may_lay_out = False
        return subscriptions

    async def _let_others_finish(self, store: PostgresStore, declared: Sequence[Declared]) -> None:
        """They get the same news, and let go. What they have on its way would come twice if it were taken from them."""
        deadline = self._clock() + _COURTESY
        while self._clock() < deadline:
            if not await store.in_other_hands(declared, self._edition):
                return
            await asyncio.sleep(_LOOK_AGAIN)

    async def _say_farewell(self, store: PostgresStore, leaving: frozenset[str]) -> None:
        """Deleted subscriptions are forgotten, once no relay with an older configuration moves them any more."""
        named, edition = {full_name(each) for each in self._config.subscriptions}, self._edition
        try:
            while True:
                farewell = await store.retire_gone(named | leaving, edition)
                for name in farewell.retired:
                    log.info("A deleted subscription was forgotten.", extra={"subscription": name})
                if not farewell.awaited:
                    return
                await asyncio.sleep(_FAREWELL_EVERY)
        except MailboatError as error:  # whoever works on this connection notices too, and begins again
            log.debug("Deleted subscriptions were not forgotten: %s", error)

    def _wanted_connection(self) -> Connection:
        """Raises ``ConfigError`` where there is no URL, unless there is a connection: what is there goes on."""
        config = self._wanted
        try:
            url = database_url(config.relay, self._secrets)()
        except ConfigError:
            if self._connection is None:
                raise
            url = self._connection.url
        return Connection.wanted_by(config.relay.spec, self._timings(config), self._limits, url)

    def _timings(self, config: Configuration) -> Timings:
        if self._own_timings is not None:
            return self._own_timings
        longest = max((each.spec.delivery.timeout.seconds for each in config.subscriptions), default=30.0)
        # A lease must outlast a whole delivery, with room for a few heartbeats that come late.
        return Timings(lease_ttl=longest + 30.0)

    def _waits(self, why: str) -> None:
        if why != self._message:
            log.info("Not connected yet: %s", why, extra={"relay": self.name})
        self._state, self._message, self._reason = RelayState.CONNECTING, why, Reason.STARTING

    def _wake(self) -> WakeSettings:
        wake = self._config.relay.spec.wake
        return WakeSettings(wake.poll_interval.seconds, wake.idle_after, wake.max_idle_interval.seconds)

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        """An assignment from outside for one subscription. False if a newer one is known already."""
        session, store = self._session, self._store
        if session is None or store is None:
            raise DatabaseUnavailable("not connected to the database, where assignments are kept: try again")
        numbers = [number for number, stream in session.streams.items() if stream.name == name]
        if not numbers:
            raise LookupError(name)
        if session.streams[numbers[0]].pulled:
            return True  # its partitions belong to consumers, which may hold their cursors for long
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
            message=self._message or _trouble(janitor),
            reason=self._reason or "",
            database_reachable=session is not None,
            schema_ready=self._schema.ready,
            outbox=self._config.relay.spec.outbox.table,
            partitions_ahead_days=janitor.upkeep.days_ahead if janitor else None,
            retention_blocked=janitor.upkeep.blocked if janitor else None,
            peers=tuple(p.id for p in session.roster.peers if p.alive) if session and session.roster else (),
            subscriptions=tuple(
                self._subscription(name) for name in sorted([*self._lineup.parts, *self._lineup.failed])
            ),
            stalled=self._serving and stalled(session, self._clock()),
        )

    def _subscription(self, name: str) -> SubscriptionStatus:
        failed = self._lineup.failed.get(name)
        if failed is not None:
            return failed_status(failed, self._totals)
        return subscription_status(self._lineup.parts[name].resource, self._session, self._totals, self._rates[name])

    async def _sample_rates(self) -> None:
        while True:
            now, names = self._clock(), set(self._lineup.parts)
            for name in names:
                self._rates.note(name, now, delivered(name, self._session, self._totals))
            self._rates.forget_all_but(names)
            await asyncio.sleep(1.0)


def _effect(config: Configuration) -> object:
    """The part of a configuration that a running relay can feel."""
    spec = config.relay.spec
    subscriptions = [(full_name(each), each.metadata.uid, each.spec) for each in config.subscriptions]
    return config.relay.metadata.uid, spec.database, spec.outbox, spec.wake, subscriptions


def _trouble(janitor: Janitor | None) -> str:
    """What a relay that runs should still be asked about: without upkeep, writers run out of partitions."""
    return f"Upkeep of the outbox failed: {janitor.upkeep.error}" if janitor and janitor.upkeep.error else ""


async def _either(*events: asyncio.Event) -> None:
    """Until one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def _quietly_close(store: PostgresStore, *, leave: bool) -> None:
    try:
        await store.close(leave=leave)
    except MailboatError as error:
        log.debug("The connection ended badly: %s", error)
