"""Configuration changes while a relay runs, from a replaced file or pushed over HTTP.

Both use ``ConfigSource._offer``, which keeps three invariants. An invalid configuration is refused as a whole, and the
current one stays in use. A configuration older than the current one is ignored. An equal one changes nothing. So the
order, number and channel of arrivals do not matter.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mailboat.errors import ConfigError
from mailboat.runtime.file_watch import watch
from mailboat.runtime.manifest_files import is_missing, load, load_body
from mailboat_spec import EventSubscription, Manifests, OutboxRelay, full_name
from mailboat_spec.names import CONFIG_VERSION_ANNOTATION
from mailboat_spec.relay_status import ConfigReport

log = logging.getLogger(__name__)


class OlderConfig(ConfigError):
    """The offered configuration is older than the current one."""


@dataclass(frozen=True, slots=True)
class Configuration:
    relay: OutboxRelay
    subscriptions: tuple[EventSubscription, ...]
    version: int | None = None
    """Config version, increased with every change; None if changes are not counted."""


@dataclass(eq=False)
class ConfigSource:
    take: Callable[[Configuration], None]
    current: Configuration | None = None
    error: str | None = None
    """Why the last offered configuration was refused."""
    _offering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def report(self) -> ConfigReport:
        return ConfigReport(self.current.version if self.current else None, self.error)

    async def push(self, body: bytes) -> int | None:
        """Apply a configuration from a request. Raise ``OlderConfig`` or ``ConfigError`` with the reason."""
        source = "the request's body"
        return await self._offer(lambda: load_body(body, source), source)

    async def follow(self, paths: Sequence[Path]) -> None:
        """Follow files until cancelled. Files may be missing at first. Each error is logged once per change."""

        async def changed() -> None:
            source = ", ".join(str(path) for path in paths)
            if self.current is None and any(is_missing(path) for path in paths):
                log.info("Waiting for configuration files", extra={"files": source})
                return
            try:
                await self._offer(lambda: load(paths), source)
            except OlderConfig as error:
                log.info("Configuration ignored: %s", error)
            except ConfigError as error:
                log.error("Configuration refused: %s", error)

        await watch(paths, changed)

    async def _offer(self, read: Callable[[], Manifests], source: str) -> int | None:
        async with self._offering:
            try:
                # In a thread: a thousand lines of YAML take long to parse, and delivery must continue.
                offered = await asyncio.to_thread(lambda: configuration(read()))
                if self.current is not None:
                    compare(offered, self.current)
            except ConfigError as error:
                if not isinstance(error, OlderConfig):
                    self.error = str(error)
                raise
            self.error = None
            if offered != self.current:
                self.current = offered
                log.info("Configuration accepted", extra={"source": source, "version": offered.version})
                self.take(offered)
            return offered.version


def configuration(manifests: Manifests) -> Configuration:
    if len(manifests.relays) > 1:
        names = ", ".join(full_name(relay) for relay in manifests.relays)
        raise ConfigError(f"a configuration that is followed has one OutboxRelay, and this one has several: {names}.")
    relay = manifests.relays[0]
    return Configuration(relay, manifests.subscriptions, _version(relay))


def compare(offered: Configuration, current: Configuration) -> None:
    """Raise ``OlderConfig`` for an older version, or ``ConfigError`` for another OutboxRelay."""
    current_name, offered_name = full_name(current.relay), full_name(offered.relay)
    if current_name != offered_name:
        raise ConfigError(
            f"this relay serves OutboxRelay {current_name}, not {offered_name}: start another one for it."
        )
    if (offered.version or 0) < (current.version or 0):
        raise OlderConfig(f"version {offered.version or 0} is older than {current.version}, which is in use.")


def _version(relay: OutboxRelay) -> int | None:
    text = relay.metadata.annotations.get(CONFIG_VERSION_ANNOTATION)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 2**63):
        raise ConfigError(
            f"OutboxRelay {full_name(relay)}: metadata.annotations: {CONFIG_VERSION_ANNOTATION} must be a number above"
            " 0 that rises with every change."
        )
    return int(text)
