"""A relay: the loop around its sessions, and its status.

A relay starts with its configuration only and retries as long as a dependency is unavailable: a database that is not up
yet or goes down, a schema that is not migrated yet. Only an invalid manifest ends the relay (``ConfigError``). If the
configuration is *followed*, an invalid manifest does not end it either, because it can be corrected without a restart.

One connection carries one session. A new configuration or a changed secret is applied while the session runs
(`changeover`): only the changed subscriptions finish their batches and restart. If the connection settings changed, the
session ends in an orderly way and the relay reconnects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from random import Random

from mailboat.delivery.backoff import Backoff, Outage
from mailboat.delivery.checkpoints import Passing, ignore_checkpoint
from mailboat.delivery.poll_interval import WakeSettings
from mailboat.delivery.stream import Clock, Stream
from mailboat.errors import ConfigError, DatabaseUnavailable, ForeignDatabase, LeaseLost, MailboatError, SchemaMismatch
from mailboat.runtime.condition_reasons import reason_for
from mailboat.runtime.config_change import ConfigChange, close_all
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.coverage_watch import CoverageWatch
from mailboat.runtime.database_settings import DatabaseSettings
from mailboat.runtime.maintenance import Maintenance, RetentionClock
from mailboat.runtime.rates import Rates
from mailboat.runtime.relay_status import RelayState, RelayStatus, SubscriptionStatus
from mailboat.runtime.schema_gate import SchemaGate, StopRequested, unless_stopped
from mailboat.runtime.secrets import Secrets, database_url
from mailboat.runtime.session import RelaySession, Timings, Totals
from mailboat.runtime.stream_parts import StreamParts
from mailboat.runtime.subscription_set import (
    SubscriptionSet,
    build_subscriptions,
    needs_new_secrets,
    rebuild_subscriptions,
)
from mailboat.runtime.subscription_status import delivered, failed_status, stalled, subscription_status
from mailboat.sinks.protocol import Sink
from mailboat.store.coverage import Coverage
from mailboat.store.outbox_store import Subscription
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import ReadLimits, RelayIdentity
from mailboat.store.subscription_rows import UNCOUNTED, ConfigVersion, SubscriptionManifest
from mailboat_spec import EventSubscription, OutboxRelay, Reason, full_name

log = logging.getLogger(__name__)

_RECONNECT = Backoff(initial=0.2, factor=2, ceiling=10.0, jitter=0.2)
_LONG_ENOUGH = 5.0
"""Seconds of connection after which the next outage restarts the back-off."""
_COURTESY = 10.0
"""Seconds for which repartitioning waits until other relays, which get the same configuration, have finished."""
_LOOK_AGAIN = 0.05
_RETIRE_EVERY = 1.0


class Relay:
    """One OutboxRelay and its subscriptions in this process."""

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
        passing: Passing = ignore_checkpoint,
    ) -> None:
        """``follows``: the configuration may change at run time, so an invalid one does not end the relay."""
        self.name = full_name(resource)
        self._config = Configuration(resource, tuple(subscriptions), version)
        self._next: Configuration | None = None
        self._follows = follows
        self._secrets = secrets
        self._identity = identity
        self._clock = clock
        self._random = random or Random()
        self._passing = passing
        self._subscription_set = (
            rebuild_subscriptions(subscriptions, secrets, SubscriptionSet())
            if follows
            else build_subscriptions(subscriptions, secrets)
        )
        self._timings = timings or Timings()
        self._limits = limits or ReadLimits()
        self._totals = Totals()
        self._stir = asyncio.Event()
        """Set on a change of configuration or secrets, and on stop. Also ends the wait before the next session."""
        self._connection: DatabaseSettings | None = None
        self._session: RelaySession | None = None
        self._serving = False
        """Whether the session runs. Between sessions the status describes the previous one."""
        self._store: PostgresStore | None = None
        self._unused: list[Sink] = []
        """Sinks used only by subscriptions that are being withdrawn."""
        self._maintenance: Maintenance | None = None
        self._coverage: CoverageWatch | None = None
        self._retention_clock = RetentionClock()
        self._state = RelayState.CONNECTING
        self._message = "has not connected yet"
        self._reason: Reason | None = Reason.STARTING
        self._schema = SchemaGate(self.name, self._waits)
        self._was_connected = False
        self._may_lay_out = True
        """Whether this relay may repartition: only with a configuration not declared yet (see ``declaring``)."""
        self._rates = Rates()

    # -- configuration changes ---------------------------------------------------------------------------------------

    def reconfigure(self, config: Configuration) -> None:
        """Apply another configuration of the same OutboxRelay once the batches in flight are settled."""
        if self._next is None and _effect(config) == _effect(self._config):
            self._config = config  # the change concerns pods only, not delivery
            return
        self._next = config
        self._stir.set()

    def refresh(self) -> None:
        """Reload secrets in use if they changed."""
        if self._session is None:
            self._stir.set()  # reconnect now: a wrong password may be the cause of the outage
        elif self._wanted_connection() != self._connection or needs_new_secrets(self._subscription_set, self._secrets):
            log.info("A secret has changed.", extra={"relay": self.name})
            self._stir.set()

    @property
    def _wanted(self) -> Configuration:
        return self._next or self._config

    def _take_up(self, stop: asyncio.Event) -> list[Sink]:
        """Make the pending configuration the current one and return the sinks that are no longer used."""
        if not stop.is_set():
            self._stir.clear()
        before = self._subscription_set
        if self._next is not None:
            self._config, self._next = self._next, None
            self._may_lay_out = True
        if self._follows or self._was_connected or needs_new_secrets(before, self._secrets):
            self._subscription_set = rebuild_subscriptions(self._config.subscriptions, self._secrets, before)
        return before.replaced_by(self._subscription_set)

    # -- life cycle --------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set; then finish the batches in flight, settle and release."""
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
                except StopRequested:
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
            await close_all(parts.sink for parts in self._subscription_set.parts.values())

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
        """Run one connection and its session."""
        wanted = self._wanted_connection()
        read_url = database_url(self._config.relay, self._secrets)

        def url() -> str:
            try:
                return read_url()
            except ConfigError:  # the secret was removed: continue with the known URL
                return wanted.url

        schema = self._schema
        await unless_stopped(
            stop, schema.prepare(url, self._config.relay.spec, wanted.settings.deadline), schema.in_the_middle
        )
        store = await unless_stopped(stop, PostgresStore.open(url, self._identity, wanted.settings))
        orderly = False
        layout, pooler = wanted.settings.layout, wanted.settings.pooler
        maintenance = Maintenance(url, layout, wanted.retention, pooler, self._retention_clock)
        coverage = CoverageWatch(url, layout, pooler, lambda: self._config.subscriptions)
        upkeep = {asyncio.ensure_future(each.run()) for each in (maintenance, coverage)}
        try:
            self._maintenance, self._coverage, self._connection = maintenance, coverage, wanted
            await self._serve(store, stop)
            orderly = True
        except StopRequested:
            orderly = True
            raise
        finally:
            self._session = self._store = self._connection = None
            for task in upkeep:
                task.cancel()
            unused, self._unused = self._unused, []
            await close_all(unused)
            await _quietly_close(store, leave=orderly)
            await asyncio.wait(upkeep, timeout=_LONG_ENOUGH)

    async def _serve(self, store: PostgresStore, stop: asyncio.Event) -> None:
        """Declare the subscriptions, join, and run one session."""
        subscriptions = await unless_stopped(stop, self._declare(store))
        streams = {
            number: self._stream(self._subscription_set.parts[subscription.name], subscription)
            for number, subscription in subscriptions.items()
        }
        await unless_stopped(stop, store.join())
        session = RelaySession(
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
        self._session, self._store = session, store
        self._state, self._message, self._reason = RelayState.RUNNING, "", None
        self._was_connected = True
        log.info("Connected.", extra=self._about)
        ends = asyncio.Event()
        config_change = ConfigChange(store, session, self._subscription_set, self._stream)
        try:
            self._serving = True
            await session.run(ends, self._take_up_news(store, session, config_change, stop, ends))
        finally:
            self._serving = False

    async def _take_up_news(
        self,
        store: PostgresStore,
        session: RelaySession,
        config_change: ConfigChange,
        stop: asyncio.Event,
        ends: asyncio.Event,
    ) -> None:
        """Apply configuration changes to a running session. If a change needs another connection, end the session."""
        retirement = asyncio.ensure_future(self._retire_removed(store, config_change.leaving))
        try:
            while True:
                await _either(self._stir, config_change.left)
                if stop.is_set() or self._wanted_connection() != self._connection:
                    if not stop.is_set():
                        log.info("The way to the database has changed: reconnecting.", extra=self._about)
                    ends.set()
                    return
                retirement.cancel()
                config_change.left.clear()
                self._unused += self._take_up(stop)
                config_change.dismiss(self._subscription_set, lambda each: self._let_others_finish(store, [each]))
                await config_change.declare(self._subscription_set, self._config_version, may_lay_out=self._may_lay_out)
                self._may_lay_out = config_change.under_way
                session.committer.poll_by(self._wake())
                idle = [sink for sink in self._unused if not config_change.uses(sink)]
                self._unused = [sink for sink in self._unused if config_change.uses(sink)]
                await close_all(idle)
                if not config_change.under_way:
                    log.info("The new configuration is in use.", extra=self._about)
                retirement = asyncio.ensure_future(self._retire_removed(store, config_change.leaving))
        finally:
            retirement.cancel()
            config_change.stop()

    @property
    def _about(self) -> dict[str, str]:
        return {"relay": self.name, "id": self._identity.id, "outbox": self._config.relay.spec.outbox.table}

    @property
    def _config_version(self) -> ConfigVersion:
        return ConfigVersion(self._config.version or 0, self._config.relay.metadata.uid) if self._follows else UNCOUNTED

    def _stream(self, parts: StreamParts, subscription: Subscription) -> Stream:
        stream = parts.stream(subscription, self._clock, self._random, self._passing)
        stream.meters = self._totals.meters[parts.name]
        return stream

    async def _declare(self, store: PostgresStore) -> dict[int, Subscription]:
        declared = [SubscriptionManifest.of(each.resource) for each in self._subscription_set.parts.values()]
        if self._may_lay_out and self._was_connected:
            await self._let_others_finish(store, declared)
        subscriptions = await store.declare(
            declared, may_lay_out=self._may_lay_out, config_version=self._config_version
        )
        self._may_lay_out = False
        return subscriptions

    async def _let_others_finish(self, store: PostgresStore, declared: Sequence[SubscriptionManifest]) -> None:
        """Wait until other relays, which get the same configuration, released their partitions.

        Repartitioning earlier would redeliver their in-flight batches.
        """
        deadline = self._clock() + _COURTESY
        while self._clock() < deadline:
            if not await store.in_other_hands(declared, self._config_version):
                return
            await asyncio.sleep(_LOOK_AGAIN)

    async def _retire_removed(self, store: PostgresStore, leaving: frozenset[str]) -> None:
        """Retire deleted subscriptions once no relay with an older configuration delivers them."""
        named, config_version = {full_name(each) for each in self._config.subscriptions}, self._config_version
        try:
            while True:
                retirement = await store.retire_gone(named | leaving, config_version)
                for name in retirement.retired:
                    log.info("Subscription deleted; its progress is kept for 24 h", extra={"subscription": name})
                if not retirement.awaited:
                    return
                await asyncio.sleep(_RETIRE_EVERY)
        except MailboatError as error:  # the session on the same connection fails too and is restarted
            log.debug("Deleted subscriptions were not retired: %s", error)

    def _wanted_connection(self) -> DatabaseSettings:
        """Return the connection that the wanted configuration needs.

        If there is no URL, keep the URL of the open connection. Raise ``ConfigError`` if there is no connection.
        """
        config = self._wanted
        try:
            url = database_url(config.relay, self._secrets)()
        except ConfigError:
            if self._connection is None:
                raise
            url = self._connection.url
        return DatabaseSettings.wanted_by(config.relay.spec, self._timings, self._limits, url)

    def _waits(self, why: str) -> None:
        if why != self._message:
            log.info("Not connected yet: %s", why, extra={"relay": self.name})
        self._state, self._message, self._reason = RelayState.CONNECTING, why, Reason.STARTING

    def _wake(self) -> WakeSettings:
        wake = self._config.relay.spec.wake
        return WakeSettings(wake.poll_interval.seconds, wake.idle_after, wake.max_idle_interval.seconds)

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        """Store an external assignment for one subscription. Return False if a newer one is already stored."""
        session, store = self._session, self._store
        if session is None or store is None:
            raise DatabaseUnavailable("not connected to the database, where assignments are kept: try again")
        numbers = [number for number, stream in session.streams.items() if stream.name == name]
        if not numbers:
            raise LookupError(name)
        if session.streams[numbers[0]].pulled:
            return True  # the partitions belong to consumers, which may hold their cursors for a long time
        return await store.assign(numbers[0], generation, owners)

    # -- status ------------------------------------------------------------------------------------------------------

    def status(self) -> RelayStatus:
        """Return the status from memory, without any query."""
        session = self._session
        maintenance = self._maintenance
        return RelayStatus(
            name=self.name,
            relay=self._identity.id,
            state=self._state,
            message=self._message or _trouble(maintenance),
            reason=self._reason or "",
            database_reachable=session is not None,
            schema_ready=self._schema.ready,
            outbox=self._config.relay.spec.outbox.table,
            database=self._store.database if self._store else "",
            missing_roles=self._schema.missing_roles,
            partitions_ahead_days=maintenance.upkeep.days_ahead if maintenance else None,
            retention_blocked=maintenance.upkeep.blocked if maintenance else None,
            oldest_snapshot_age=self._coverage.snapshot.age.total_seconds() if self._coverage else None,
            old_snapshot=self._coverage.snapshot.warning if self._coverage else "",
            coverage=self._coverage.found if self._coverage else Coverage(),
            peers=tuple(p.id for p in session.membership.peers if p.alive) if session and session.membership else (),
            silent=tuple(p.id for p in session.membership.peers if p.silent) if session and session.membership else (),
            subscriptions=tuple(
                self._subscription(name)
                for name in sorted([*self._subscription_set.parts, *self._subscription_set.failed])
            ),
            stalled=self._serving and stalled(session, self._clock()),
            was_connected=self._was_connected,
        )

    def _subscription(self, name: str) -> SubscriptionStatus:
        failed = self._subscription_set.failed.get(name)
        if failed is not None:
            return failed_status(failed, self._totals)
        resource = self._subscription_set.parts[name].resource
        return subscription_status(resource, self._session, self._totals, self._rates[name], self._clock())

    async def _sample_rates(self) -> None:
        while True:
            now, names = self._clock(), set(self._subscription_set.parts)
            for name in names:
                self._rates.note(name, now, delivered(name, self._session, self._totals))
            self._rates.forget_all_but(names)
            await asyncio.sleep(1.0)


def _effect(config: Configuration) -> object:
    """Return the part of a configuration that affects a running relay."""
    spec = config.relay.spec
    subscriptions = [(full_name(each), each.metadata.uid, each.spec) for each in config.subscriptions]
    return config.relay.metadata.uid, spec.database, spec.outbox, spec.wake, subscriptions


def _trouble(maintenance: Maintenance | None) -> str:
    """Return the error of the outbox maintenance, without which writers run out of time partitions."""
    return (
        f"Upkeep of the outbox failed: {maintenance.upkeep.error}" if maintenance and maintenance.upkeep.error else ""
    )


async def _either(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
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
