"""The process around relays: HTTP server, watched files, and shutdown.

Two modes. *Fixed*: the manifests are read once and may contain several OutboxRelays. *Following*: one OutboxRelay,
whose configuration may arrive later and change. Secrets are watched in both modes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mailboat.cli.following import follow_file
from mailboat.cli.options import outboxes_of
from mailboat.errors import DatabaseUnavailable
from mailboat.http.assignment import Assign
from mailboat.http.callers import Callers
from mailboat.http.server import Configure, HttpServer, Surface, Told
from mailboat.outbox.settings import RelayIdentity
from mailboat.runtime.advice import subscription_warnings
from mailboat.runtime.followed import ConfigReport, Configuration, Followed
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.watching import fingerprint, secret_versions, watch
from mailboat_spec import Manifests, full_name

log = logging.getLogger("mailboat.run")


@dataclass(frozen=True, slots=True)
class Orders:
    """Options of ``mailboat run``."""

    files: tuple[Path, ...]
    secrets_folder: Path | None
    secrets: Secrets
    relay_id: str
    listen: tuple[str, int]
    callers: Callers
    assignment: Path | None
    advertised: str = ""


class Process:
    """State shared by the relays of one process."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.stop = asyncio.Event()
        self.relays: list[Relay] = []
        # Before any relay reads them: a secret replaced while relays are created would be missed until its next change.
        self._secrets_seen = fingerprint([orders.secrets_folder]) if orders.secrets_folder is not None else None
        self.secret_versions = secret_versions(orders.secrets_folder)
        self._server = HttpServer.bind(*orders.listen, orders.advertised)

    def relay(self, config: Configuration, relay_id: str, *, follows: bool) -> Relay:
        identity = RelayIdentity(relay_id, str(uuid.uuid4()), self._server.address)
        if not config.subscriptions:
            log.warning(
                "No EventSubscription refers to this relay: it moves nothing.", extra={"relay": full_name(config.relay)}
            )
        return Relay(
            config.relay,
            config.subscriptions,
            secrets=self.orders.secrets,
            identity=identity,
            version=config.version,
            follows=follows,
        )

    @asynccontextmanager
    async def afloat(self, config: Followed | None, *watching: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run the HTTP server and the watchers for the duration of the block."""
        orders, assign = self.orders, assign_to(self.relays)
        configure: Configure | None = config.push if config is not None else None
        surface = Surface(
            lambda: [each.status() for each in self.relays],
            assign,
            orders.callers,
            stopping=self.stop.is_set,
            told=lambda: Told(config.report if config is not None else ConfigReport(), self.secret_versions),
            configure=configure,
        )
        works = [*watching]
        if orders.assignment is not None:
            works.append(follow_file(orders.assignment, assign))
        tasks: list[asyncio.Task[None]] = []

        def begin(work: Coroutine[Any, Any, None]) -> None:
            tasks.append(asyncio.create_task(work))
            tasks[-1].add_done_callback(self._mourn)

        for work in works:
            begin(work)
        try:
            _stop_on_signals(self.stop)  # before the process is reported as running
            await self._server.start(surface)
            names = [each.name for each in self.relays]
            log.info("Listening.", extra={"address": self._server.address, "id": orders.relay_id, "relays": names})
            if orders.secrets_folder is not None:
                # Last step before relays start: a refresh before their start would have no effect.
                begin(watch([orders.secrets_folder], self._secrets_changed, seen=self._secrets_seen))
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()
        log.info("Stopped.", extra={"id": self.orders.relay_id})

    def _mourn(self, task: asyncio.Task[None]) -> None:
        """Shut down if a watcher failed unexpectedly: a restart is better than a relay that misses changes."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("Something that should be watched is not any more.", exc_info=error)
            self.stop.set()

    async def _secrets_changed(self) -> None:
        for relay in self.relays:
            relay.refresh()
        self.secret_versions = secret_versions(self.orders.secrets_folder)


async def run_fixed(orders: Orders, manifests: Manifests) -> None:
    """Run relays for all manifests until a signal."""
    async with Process(orders) as process:
        served = outboxes_of(manifests, orders.secrets)
        for outbox in served:
            # Relays of one process may share a database, in which relay ids are unique.
            relay_id = orders.relay_id if len(served) == 1 else f"{orders.relay_id}/{full_name(outbox.relay)}"
            config = Configuration(outbox.relay, outbox.subscriptions)
            process.relays.append(process.relay(config, relay_id, follows=False))
        async with process.afloat(None):
            await _run_all(process.relays, process.stop)


async def run_following(orders: Orders) -> None:
    """Run one relay, from its first configuration until a signal."""
    arrived = asyncio.Event()
    async with Process(orders) as process:

        def take(config: Configuration) -> None:
            for warning in (each for resource in config.subscriptions for each in subscription_warnings(resource)):
                log.warning("Probably a mistake in a manifest: %s.", warning)
            if process.relays:
                process.relays[0].reconfigure(config)
            else:
                process.relays.append(process.relay(config, orders.relay_id, follows=True))
                arrived.set()

        followed = Followed(take)
        async with process.afloat(followed, followed.follow(orders.files)):
            await _first(arrived, process.stop)
            await _run_all(process.relays, process.stop)


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


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


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop_now(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("Stopping at once.", extra={"signal": number.name})
            sys.stderr.flush()
            os._exit(128 + number)
        log.info("Stopping in good order; a second signal stops at once.", extra={"signal": number.name})
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_now, number)
