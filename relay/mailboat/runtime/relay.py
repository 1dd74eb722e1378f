"""A relay: the loop around its sessions, and its status. The package docstring has the states."""

import asyncio
import logging
import time
from functools import partial
from random import Random

from mailboat.delivery.backoff import Backoff
from mailboat.delivery.counters import Totals
from mailboat.delivery.poll_interval import WakeSettings
from mailboat.delivery.stream import CheckpointHook, Stream, ignore_checkpoint
from mailboat.errors import ConfigError, DatabaseUnavailable, ForeignDatabase, LeaseLost, MailboatError, SchemaMismatch
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.maintenance import Maintenance, RetentionClock, SchemaGate
from mailboat.runtime.relay_config import Connected, DatabaseSettings, RelayConfig, close_all, wait_for_others
from mailboat.runtime.relay_status import RelayState, RelayStatus, stalled, subscription_statuses
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.session import RelaySession
from mailboat.runtime.shutdown import StopRequested, first_of, unless_stopped
from mailboat.runtime.subscription_set import StreamParts, reason_for
from mailboat.runtime.timings import Timings
from mailboat.store.examination import Coverage
from mailboat.store.outbox_store import Subscription
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import ReadLimits, RelayIdentity
from mailboat_spec import Reason, full_name

log = logging.getLogger(__name__)

_RECONNECT = Backoff(initial=0.2, factor=2, ceiling=10.0, jitter=0.2)
_LONG_ENOUGH = 5.0
"""Seconds of connection after which the next outage restarts the back-off."""
_NEEDS_A_PERSON = (SchemaMismatch, ForeignDatabase, ConfigError)


class Relay:
    """One OutboxRelay and its subscriptions in this process."""

    def __init__(
        self,
        config: Configuration,
        *,
        secrets: Secrets,
        identity: RelayIdentity,
        follows: bool = False,
        timings: Timings | None = None,
        limits: ReadLimits | None = None,
        on_checkpoint: CheckpointHook = ignore_checkpoint,
    ) -> None:
        self.name = full_name(config.relay)
        self._timings = timings or Timings()
        self._config = RelayConfig(config, secrets, self._timings, limits or ReadLimits(), follows=follows)
        self._identity = identity
        self._random = Random()
        self._on_checkpoint = on_checkpoint
        self._totals = Totals()
        self._schema = SchemaGate(self.name, self._waits)
        self._retention_clock = RetentionClock()
        self._maintenance: Maintenance | None = None
        self._state = RelayState.CONNECTING
        self._message = "has not connected yet"
        self._reason: Reason | None = Reason.STARTING
        self._connected: Connected | None = None
        """None unless a session runs."""
        self._was_connected = False

    def reconfigure(self, config: Configuration) -> None:
        """Apply another configuration of the same OutboxRelay."""
        self._config.offer(config)

    def refresh(self) -> None:
        """Reload secrets in use if they changed."""
        if self._connected is None:
            self._config.changed.set()  # reconnect now: a wrong password may be the cause of the outage
        elif self._config.secrets_changed(self._connected.settings):
            log.info("Secret changed", extra={"relay": self.name})
            self._config.changed.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set; then finish the batches in flight, settle and release."""
        failures = 0
        try:
            while not stop.is_set():
                began = time.monotonic()
                try:
                    await close_all(self._config.take_up())
                    await self._connect(stop)
                    failures = 0
                except StopRequested:
                    break
                except (DatabaseUnavailable, LeaseLost, *_NEEDS_A_PERSON) as error:
                    if isinstance(error, ConfigError) and not (self._config.follows or self._was_connected):
                        raise
                    failures = 1 if time.monotonic() - began > _LONG_ENOUGH else failures + 1
                    self._disconnected(error)
                    await first_of(stop, self._config.changed, timeout=_RECONNECT.delay(failures, self._random))
            self._enter(RelayState.STOPPING, "stopped")
        finally:
            await close_all(parts.sink for parts in self._config.subscription_set.parts.values())

    def _enter(self, state: RelayState, message: str = "", reason: Reason | None = None) -> None:
        """Enter a state, with its explanation for a person and for the operator. Stopping is final."""
        if self._state is not RelayState.STOPPING or state is RelayState.STOPPING:
            self._state, self._message, self._reason = state, message, reason

    def _waits(self, why: str) -> None:
        if why != self._message:
            log.info("Not connected yet: %s", why, extra={"relay": self.name})
        self._enter(RelayState.CONNECTING, why, Reason.STARTING)

    def _disconnected(self, error: MailboatError) -> None:
        if str(error) != self._message:
            log.warning("Not connected: %s", error, extra={"relay": self.name})
        state = RelayState.FAILED if isinstance(error, _NEEDS_A_PERSON) else RelayState.CONNECTING
        self._enter(state, str(error), reason_for(error))

    async def _connect(self, stop: asyncio.Event) -> None:
        settings, relay, schema = self._config.database_settings(), self._config.current.relay, self._schema
        url = partial(self._config.database_url, relay, settings.url)
        migration = schema.prepare(url, relay.spec, settings.settings.deadline)
        await unless_stopped(stop, migration, lambda: schema.migrating)
        store = await unless_stopped(stop, PostgresStore.open(url, self._identity, settings.settings))
        layout, pooler = settings.settings.layout, settings.settings.pooler
        self._maintenance = maintenance = Maintenance(url, layout, settings.retention, pooler, self._retention_clock)
        examination = maintenance.examine(lambda: self._config.current.subscriptions)
        background = {asyncio.ensure_future(each) for each in (maintenance.run(), examination)}
        orderly = False
        try:
            await self._serve(store, settings, maintenance, stop)
            orderly = True
        except StopRequested:
            orderly = True
            raise
        finally:
            for task in background:
                task.cancel()
            try:
                await store.close(leave=orderly)
            except MailboatError as error:
                log.debug("Connection was not closed in an orderly way: %s", error)
            await asyncio.wait(background, timeout=_LONG_ENOUGH)

    async def _serve(
        self, store: PostgresStore, settings: DatabaseSettings, maintenance: Maintenance, stop: asyncio.Event
    ) -> None:
        config = self._config
        subscriptions = await unless_stopped(stop, self._declare(store))
        parts = config.subscription_set.parts
        streams = {number: self._stream(parts[each.name], each) for number, each in subscriptions.items()}
        await unless_stopped(stop, store.join())
        session = RelaySession(
            store,
            self._identity.id,
            streams,
            subscriptions,
            self._wake(),
            self._timings,
            self._totals,
            time.monotonic,
            self._on_checkpoint,
            lambda: maintenance.snapshot.age,
        )
        self._connected = connected = Connected(config, settings, store, session, self._stream)
        self._was_connected = True
        self._enter(RelayState.RUNNING)
        log.info("Connected.", extra=self._about)
        ends = asyncio.Event()
        try:
            await session.run(ends, self._follow_config(connected, stop, ends))
        finally:
            self._connected = None
            await close_all(connected.replaced)

    async def _follow_config(self, connected: Connected, stop: asyncio.Event, ends: asyncio.Event) -> None:
        """Apply configuration changes to a running session. On a stop or for another connection, end the session."""
        try:
            while True:
                retirement = asyncio.ensure_future(connected.retire_removed())
                try:
                    await first_of(stop, self._config.changed, connected.withdrawn)
                finally:
                    retirement.cancel()
                if stop.is_set():
                    self._enter(RelayState.STOPPING, "finishing the batches in flight")
                    break
                if self._config.database_settings(connected.settings) != connected.settings:
                    log.info("Connection settings changed, reconnecting", extra=self._about)
                    self._enter(RelayState.CONNECTING, "reconnecting with changed settings", Reason.STARTING)
                    break
                complete = await connected.apply()
                connected.session.committer.poll_by(self._wake())
                if complete:
                    log.info("Configuration in use", extra=self._about)
            ends.set()
        finally:
            connected.stop()

    @property
    def _about(self) -> dict[str, str]:
        return {"relay": self.name, "id": self._identity.id, "outbox": self._config.current.relay.spec.outbox.table}

    def _stream(self, parts: StreamParts, subscription: Subscription) -> Stream:
        return parts.stream(subscription, self._totals.meters[parts.name], self._random, self._on_checkpoint)

    async def _declare(self, store: PostgresStore) -> dict[int, Subscription]:
        config = self._config
        declared = [each.resource for each in config.subscription_set.parts.values()]
        if config.undeclared and self._was_connected:
            await wait_for_others(store, declared, config.version)
        subscriptions = await store.declare(declared, may_lay_out=config.undeclared, version=config.version)
        config.undeclared = False
        return subscriptions

    def _wake(self) -> WakeSettings:
        wake = self._config.current.relay.spec.wake
        return WakeSettings(wake.poll_interval.seconds, wake.idle_after, wake.max_idle_interval.seconds)

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        """Store an external assignment for one subscription. Return False if a newer one is already stored."""
        if self._connected is None:
            raise DatabaseUnavailable("not connected to the database, where assignments are kept: try again")
        stream = next((each for each in self._connected.session.streams.values() if each.name == name), None)
        if stream is None:
            raise LookupError(name)
        if stream.pulled:
            return True  # the partitions belong to consumers, which may hold their cursors for a long time
        return await self._connected.store.assign(stream.number, generation, owners)

    def status(self) -> RelayStatus:
        """Return the status from memory, without any query. Without a session, maintenance is as last known."""
        connected, maintenance, now = self._connected, self._maintenance, time.monotonic()
        session = connected.session if connected else None
        failure = maintenance.error if maintenance else None
        peers = session.membership.peers if session else ()
        return RelayStatus(
            name=self.name,
            relay=self._identity.id,
            state=self._state,
            # Without maintenance, writers run out of time partitions.
            message=self._message or (f"Upkeep of the outbox failed: {failure}" if failure else ""),
            reason=self._reason or "",
            database_reachable=connected is not None,
            schema_ready=self._schema.ready,
            outbox=self._config.current.relay.spec.outbox.table,
            database=connected.store.database if connected else "",
            missing_roles=self._schema.missing_roles,
            partitions_ahead_days=maintenance.days_ahead if maintenance else None,
            retention_blocked=maintenance.blocked if maintenance else None,
            oldest_snapshot_age=maintenance.snapshot.age.total_seconds() if maintenance else None,
            old_snapshot=maintenance.snapshot.warning if maintenance else "",
            coverage=maintenance.coverage if maintenance else Coverage(),
            peers=tuple(peer.id for peer in peers if peer.alive),
            silent=tuple(peer.id for peer in peers if peer.silent),
            subscriptions=subscription_statuses(self._config.subscription_set, session, self._totals, now),
            stalled=session is not None and stalled(session, now),
            was_connected=self._was_connected,
        )
