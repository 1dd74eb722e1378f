"""The configuration of a relay while it runs: the one in use, a pending one, and the subscriptions built from it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mailboat.errors import ConfigError
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.secrets import Secrets, database_url
from mailboat.runtime.subscription_set import (
    SubscriptionSet,
    build_subscriptions,
    needs_new_secrets,
    rebuild_subscriptions,
)
from mailboat.runtime.timings import Timings
from mailboat.sinks.protocol import Sink
from mailboat.store.connection import UrlProvider
from mailboat.store.settings import ReadLimits, StoreSettings
from mailboat.store.subscription_rows import UNCOUNTED, ConfigVersion
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import OutboxRelay, Retention, full_name


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """Connection settings, compared by value. If any of them changes, the relay reconnects."""

    settings: StoreSettings
    retention: Retention
    manage_schema: bool
    url: str = field(repr=False)


class RelayConfig:
    """Configuration in use and its successor.

    If the configuration is *followed*, it may change at run time, so an invalid subscription is only reported. If not,
    an invalid one raises ``ConfigError`` at the start.
    """

    def __init__(self, current: Configuration, secrets: Secrets, *, follows: bool) -> None:
        self.current = current
        self.follows = follows
        self.changed = asyncio.Event()
        """Set if there is something to take up: a configuration or a secret."""
        self.undeclared = True
        """Whether the database may not have this configuration yet. Only then may the relay repartition."""
        self._pending: Configuration | None = None
        self._secrets = secrets
        self.subscription_set = (
            rebuild_subscriptions(current.subscriptions, secrets, SubscriptionSet())
            if follows
            else build_subscriptions(current.subscriptions, secrets)
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

    def needs_new_secrets(self) -> bool:
        return needs_new_secrets(self.subscription_set, self._secrets)

    def take_up(self) -> list[Sink]:
        """Use the pending configuration and the current secrets. Return the sinks that are no longer used."""
        self.changed.clear()
        before = self.subscription_set
        if self._pending is not None:
            self.current, self._pending = self._pending, None
            self.undeclared = True
        self.subscription_set = rebuild_subscriptions(self.current.subscriptions, self._secrets, before)
        return before.replaced_by(self.subscription_set)

    def database_settings(
        self, timings: Timings, limits: ReadLimits, connected: DatabaseSettings | None
    ) -> DatabaseSettings:
        """Return the connection settings that the newest configuration needs.

        If there is no URL, keep the URL of the open connection. Raise ``ConfigError`` if there is no connection.
        """
        relay = (self._pending or self.current).relay
        url = self._url(relay, connected.url if connected else None)
        database, outbox, wake = relay.spec.database, relay.spec.outbox, relay.spec.wake
        settings = StoreSettings(
            layout=TableLayout(outbox.table, renamed(outbox.columns)),
            durability=outbox.durability,
            notify=wake.notify,
            pooler=database.pooler,
            lease_ttl=timings.lease_ttl,
            overdue_after=timings.overdue_after,
            deadline=timings.deadline,
            limits=limits,
        )
        return DatabaseSettings(settings, outbox.retention, outbox.manage_schema, url)

    def url_provider(self, last_url: str) -> UrlProvider:
        """Return a function that reads the database URL, or returns the known one if its secret was removed."""
        relay = self.current.relay
        return lambda: self._url(relay, last_url)

    def _url(self, relay: OutboxRelay, known: str | None) -> str:
        try:
            return database_url(relay, self._secrets)
        except ConfigError:
            if known is None:
                raise
            return known


def _effect(config: Configuration) -> object:
    """Return the part of a configuration that affects a running relay."""
    spec = config.relay.spec
    subscriptions = [(full_name(each), each.metadata.uid, each.spec) for each in config.subscriptions]
    return config.relay.metadata.uid, spec.database, spec.outbox, spec.wake, subscriptions
