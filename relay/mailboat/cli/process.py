"""The relay process: HTTP server, configuration, secrets, and shutdown.

Without ``--follow``, the manifests are read once and may contain several OutboxRelays. With ``--follow``, there is one
OutboxRelay, and its configuration may arrive later and change. Secrets are watched in both cases.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mailboat.cli.options import outboxes_of
from mailboat.errors import DatabaseUnavailable
from mailboat.http.auth import CallerAuth
from mailboat.http.server import Assign, HttpApi, HttpServer, StatusExtras
from mailboat.runtime.config_source import ConfigSource, Configuration
from mailboat.runtime.file_watch import fingerprint, secret_versions, watch
from mailboat.runtime.manifest_files import subscription_warnings
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.shutdown import first_of
from mailboat.store.settings import RelayIdentity
from mailboat_spec import Manifests, full_name
from mailboat_spec.relay_status import ConfigReport
from mailboat_spec.stop_signals import stop_on_signals

log = logging.getLogger("mailboat.run")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``mailboat run``."""

    files: tuple[Path, ...]
    secrets_folder: Path | None
    secrets: Secrets
    relay_id: str
    listen: tuple[str, int]
    callers: CallerAuth
    advertised: str = ""


async def run_relays(options: RunOptions, manifests: Manifests | None) -> None:
    """Run relays until a signal: for the manifests or, without manifests, for the configuration that is followed."""
    async with Process(options) as process:
        followed = None if manifests is not None else ConfigSource(process.configure)
        if manifests is not None:
            process.add_all(manifests)
        async with process.serving(followed):
            await first_of(process.configured, process.stop)
            await _run_all(process.relays, process.stop)


class Process:
    """State shared by the relays of one process."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.stop = asyncio.Event()
        self.configured = asyncio.Event()
        self.relays: list[Relay] = []
        # Before any relay reads them: a secret replaced while relays are created would be missed until its next change.
        self._secrets_seen = fingerprint([options.secrets_folder]) if options.secrets_folder is not None else None
        self.secret_versions = secret_versions(options.secrets_folder)
        self._server = HttpServer.bind(*options.listen, options.advertised)

    def add_all(self, manifests: Manifests) -> None:
        """Add a relay for every OutboxRelay. Their configurations never change."""
        outboxes = outboxes_of(manifests, self.options.secrets)
        for outbox in outboxes:
            # Relays of one process may share a database, in which relay ids are unique.
            suffix = f"/{full_name(outbox.relay)}" if len(outboxes) > 1 else ""
            config = Configuration(outbox.relay, outbox.subscriptions)
            self._add(config, self.options.relay_id + suffix, follows=False)

    def configure(self, config: Configuration) -> None:
        """Apply a followed configuration. The first one adds the relay."""
        for warning in (each for resource in config.subscriptions for each in subscription_warnings(resource)):
            log.warning("Probably a mistake in a manifest: %s.", warning)
        if self.relays:
            self.relays[0].reconfigure(config)
        else:
            self._add(config, self.options.relay_id, follows=True)

    def _add(self, config: Configuration, relay_id: str, *, follows: bool) -> None:
        if not config.subscriptions:
            log.warning(
                "No EventSubscription refers to this relay: nothing is delivered.",
                extra={"relay": full_name(config.relay)},
            )
        relay = Relay(
            config,
            secrets=self.options.secrets,
            identity=RelayIdentity(relay_id, str(uuid.uuid4()), self._server.address),
            follows=follows,
        )
        self.relays.append(relay)
        self.configured.set()

    @asynccontextmanager
    async def serving(self, followed: ConfigSource | None) -> AsyncIterator[None]:
        """Run the HTTP server and the watchers for the duration of the block."""
        options = self.options
        api = HttpApi(
            lambda: [each.status() for each in self.relays],
            assign_to(self.relays),
            options.callers,
            stopping=self.stop.is_set,
            extras=lambda: StatusExtras(
                followed.report if followed is not None else ConfigReport(), self.secret_versions
            ),
            configure=followed.push if followed is not None else None,
        )
        tasks: list[asyncio.Task[None]] = []

        def begin(work: Coroutine[Any, Any, None]) -> None:
            tasks.append(asyncio.create_task(work))
            tasks[-1].add_done_callback(self._on_task_done)

        if followed is not None:
            begin(followed.follow(options.files))
        try:
            stop_on_signals(self.stop, log)  # before the process is reported as running
            await self._server.start(api.application())
            names = [each.name for each in self.relays]
            log.info("Listening.", extra={"address": self._server.address, "id": options.relay_id, "relays": names})
            if options.secrets_folder is not None:
                # Last step before relays start: a refresh before their start would have no effect.
                begin(watch([options.secrets_folder], self._secrets_changed, seen=self._secrets_seen))
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()
        log.info("Stopped.", extra={"id": self.options.relay_id})

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Shut down if a watcher failed unexpectedly: a restart is better than a relay that misses changes."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("Watcher task failed; shutting down.", exc_info=error)
            self.stop.set()

    async def _secrets_changed(self) -> None:
        for relay in self.relays:
            relay.refresh()
        self.secret_versions = secret_versions(self.options.secrets_folder)


def assign_to(relays: Sequence[Relay]) -> Assign:
    """Return a function that passes an assignment to the relay with the subscription."""

    async def assign(name: str, generation: int, owners: dict[int, str]) -> bool:
        if not relays:
            raise DatabaseUnavailable("there is no configuration yet that says which database: try again")
        for relay in relays:
            try:
                return await relay.assign(name, generation, owners)
            except LookupError:
                continue
        raise LookupError(name)

    return assign


async def _run_all(relays: Sequence[Relay], stop: asyncio.Event) -> None:
    """Run until all relays have stopped. If one fails, stop the others gracefully and raise its error."""

    async def run_one(relay: Relay) -> None:
        try:
            await relay.run(stop)
        finally:
            stop.set()

    for ended in await asyncio.gather(*(run_one(relay) for relay in relays), return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
