"""The configuration of a relay while it runs: in use, pending, and its change in a running session."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mailboat.delivery.stream import Stream
from mailboat.errors import ConfigError, MailboatError
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.secrets import Secrets, database_url
from mailboat.runtime.session import RelaySession
from mailboat.runtime.subscription_set import StreamParts, SubscriptionSet, build_subscription, build_subscriptions
from mailboat.runtime.timings import Timings
from mailboat.sinks.protocol import Sink
from mailboat.store.outbox_store import Subscription
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import ReadLimits, StoreSettings
from mailboat.store.subscription_rows import UNCOUNTED, ConfigVersion
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import EventSubscription, OutboxRelay, Retention, full_name

log = logging.getLogger(__name__)

_OTHERS_TIMEOUT = 10.0
"""Seconds for which repartitioning waits until other relays, which get the same configuration, have finished."""
_POLL_EVERY = 0.05
_RETIRE_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """Connection settings, compared by value. If any of them changes, the relay reconnects."""

    settings: StoreSettings
    retention: Retention
    manage_schema: bool
    url: str = field(repr=False)


@dataclass(eq=False, repr=False)
class RelayConfig:
    """Configuration in use and its successor.

    If the configuration is *followed*, it may change at run time, so an invalid subscription is only reported. If not,
    an invalid one raises ``ConfigError`` at the start.
    """

    current: Configuration
    secrets: Secrets
    timings: Timings
    limits: ReadLimits
    follows: bool
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if there is something to take up: a configuration or a secret."""
    undeclared: bool = True
    """Whether the database may not have this configuration yet. Only then may the relay repartition."""
    _pending: Configuration | None = None

    def __post_init__(self) -> None:
        resources, secrets = self.current.subscriptions, self.secrets
        self.subscription_set = (
            build_subscriptions(resources, secrets, SubscriptionSet())
            if self.follows
            else SubscriptionSet({full_name(each): build_subscription(each, secrets) for each in resources})
        )

    @property
    def version(self) -> ConfigVersion:
        uid = self.current.relay.metadata.uid
        return ConfigVersion(self.current.version or 0, uid) if self.follows else UNCOUNTED

    def offer(self, config: Configuration) -> None:
        """Make a configuration pending. If only pods are affected by it, use it immediately."""
        if self._pending is None and _effect(config) == _effect(self.current):
            self.current = config
            return
        self._pending = config
        self.changed.set()

    def secrets_changed(self, connected: DatabaseSettings) -> bool:
        return self.database_settings(connected) != connected or self.subscription_set.needs(self.secrets)

    def take_up(self) -> list[Sink]:
        """Use the pending configuration and the current secrets. Return the sinks that are no longer used."""
        self.changed.clear()
        before = self.subscription_set
        if self._pending is not None:
            self.current, self._pending = self._pending, None
            self.undeclared = True
        self.subscription_set = build_subscriptions(self.current.subscriptions, self.secrets, before)
        used = {id(parts.sink) for parts in self.subscription_set.parts.values()}
        return [parts.sink for parts in before.parts.values() if id(parts.sink) not in used]

    def database_settings(self, connected: DatabaseSettings | None = None) -> DatabaseSettings:
        """Return the settings needed now. If a URL is missing, keep that of ``connected``, or raise ``ConfigError``."""
        relay, timings = (self._pending or self.current).relay, self.timings
        url = self.database_url(relay, connected.url if connected else None)
        database, outbox, wake = relay.spec.database, relay.spec.outbox, relay.spec.wake
        settings = StoreSettings(
            layout=TableLayout(outbox.table, renamed(outbox.columns)),
            durability=outbox.durability,
            notify=wake.notify,
            pooler=database.pooler,
            lease_ttl=timings.lease_ttl,
            overdue_after=timings.overdue_after,
            deadline=timings.deadline,
            limits=self.limits,
        )
        return DatabaseSettings(settings, outbox.retention, outbox.manage_schema, url)

    def database_url(self, relay: OutboxRelay, last_url: str | None) -> str:
        """Read the database URL. If its secret was removed, return the last one."""
        try:
            return database_url(relay, self.secrets)
        except ConfigError:
            if last_url is None:
                raise
            return last_url


def _effect(config: Configuration) -> object:
    """Return the part of a configuration that affects a running relay."""
    spec = config.relay.spec
    subscriptions = [(full_name(each), each.metadata.uid, each.spec) for each in config.subscriptions]
    return config.relay.metadata.uid, spec.database, spec.outbox, spec.wake, subscriptions


@dataclass(eq=False)
class Connected:
    """A session on its connection. A change of the configuration is applied to one subscription at a time.

    Unchanged subscriptions continue without a pause. A changed or deleted subscription first finishes its batches in
    flight, which takes until its sink answers (at most ``Timings.drain_within``) and delays no other subscription.
    After the withdrawal, a changed subscription is declared and admitted again.
    """

    config: RelayConfig
    settings: DatabaseSettings
    store: PostgresStore
    session: RelaySession
    new_stream: Callable[[StreamParts, Subscription], Stream]
    withdrawn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a subscription was withdrawn. Its new configuration can then be applied."""
    replaced: list[Sink] = field(default_factory=list)
    """Sinks to close once no subscription being withdrawn uses them."""
    _withdrawing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.config.subscription_set.parts
        self._delivered_by = {stream.name: parts[stream.name] for stream in self.session.streams.values()}

    async def apply(self) -> bool:
        """Take up the configuration and secrets of now. Return False if a withdrawal has to end before the rest."""
        self.withdrawn.clear()
        self.replaced += self.config.take_up()
        for number, stream in list(self.session.streams.items()):
            new, present = self.config.subscription_set.parts.get(stream.name), self._delivered_by[stream.name]
            if stream.name not in self._withdrawing and (new is None or not new.continues(present)):
                leave = self._withdraw(number, stream.name, new)
                self._withdrawing[stream.name] = self.session.spawn(leave)
        await self._declare()
        complete = not self._withdrawing and not self.withdrawn.is_set()
        self.config.undeclared = not complete
        used = {id(parts.sink) for parts in self._delivered_by.values()}
        unused = [sink for sink in self.replaced if id(sink) not in used]
        self.replaced = [sink for sink in self.replaced if id(sink) in used]
        await close_all(unused)
        return complete

    async def _withdraw(self, number: int, name: str, new: StreamParts | None) -> None:
        """Withdraw a subscription. If it stays but not its partitions, wait until other relays have finished."""
        partitions = self.session.subscriptions[number].partitions
        keep = new is not None and new.resource.spec.partitions == partitions and not new.pulled
        await self.session.withdraw(number, keep=keep)
        if new is not None and not keep:
            await wait_for_others(self.store, [new.resource], self.config.version)
        del self._withdrawing[name], self._delivered_by[name]
        self.withdrawn.set()

    async def _declare(self) -> None:
        """Declare all subscriptions not being withdrawn; admit those that are new or withdrawn and still wanted."""
        config, parts = self.config, self.config.subscription_set.parts
        declared = [each.resource for name, each in parts.items() if name not in self._withdrawing]
        found = await self.store.declare(declared, may_lay_out=config.undeclared, version=config.version)
        for number, subscription in found.items():
            if number in self.session.streams:
                self.session.set_paused(number, subscription.paused)  # the status reports the new configuration now
            else:
                present = self._delivered_by[subscription.name] = parts[subscription.name]
                self.session.admit(subscription, self.new_stream(present, subscription))

    def stop(self) -> None:
        """Stop admitting subscriptions. The session completes the pending releases when it ends."""
        for leave in self._withdrawing.values():
            leave.cancel()

    async def retire_removed(self) -> None:
        """Retire deleted subscriptions once no relay with an older configuration delivers them."""
        named = {full_name(each) for each in self.config.current.subscriptions} | self._withdrawing.keys()
        version = self.config.version
        try:
            while True:
                retired, awaited = await self.store.retire_removed(named, version)
                for name in retired:
                    log.info("Subscription deleted; its progress is kept for 24 h", extra={"subscription": name})
                if not awaited:
                    return
                await asyncio.sleep(_RETIRE_EVERY)
        except MailboatError as error:  # the session on the same connection fails too and is restarted
            log.debug("Deleted subscriptions were not retired: %s", error)


async def wait_for_others(store: PostgresStore, declared: Sequence[EventSubscription], version: ConfigVersion) -> None:
    """Wait until other relays released their partitions. Repartitioning earlier would redeliver batches in flight."""
    deadline = time.monotonic() + _OTHERS_TIMEOUT
    while time.monotonic() < deadline and await store.owned_by_others(declared, version):  # noqa: ASYNC110 - polled
        await asyncio.sleep(_POLL_EVERY)


async def close_all(sinks: Iterable[Sink]) -> None:
    """Close sinks. Log an error of a (third-party) sink and continue with the others."""
    for sink in sinks:
        try:
            await sink.close()
        except Exception:
            log.exception("Sink could not be closed")
