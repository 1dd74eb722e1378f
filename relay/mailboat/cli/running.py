"""The process around relays: its HTTP side, what it watches, and how it stops.

Two kinds of life. *Fixed*: the manifests are read once, and may hold several OutboxRelays. *Following*: one
OutboxRelay, whose configuration may come later, and change. In both, secrets are watched.
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
from mailboat.runtime.followed import ConfigReport, Configuration, Followed
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.watching import fingerprint, secret_versions, watch
from mailboat_spec import Manifests, full_name

log = logging.getLogger("mailboat.run")


@dataclass(frozen=True, slots=True)
class Orders:
    """What ``mailboat run`` was told."""

    files: tuple[Path, ...]
    secrets_folder: Path | None
    secrets: Secrets
    relay_id: str
    listen: tuple[str, int]
    callers: Callers
    assignment: Path | None


class Process:
    """What relays of one process share."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.stop = asyncio.Event()
        self.relays: list[Relay] = []
        # Before any relay reads them: one that is swapped while relays are made would be missed until its next change.
        self._secrets_seen = fingerprint([orders.secrets_folder]) if orders.secrets_folder is not None else None
        self.secret_versions = secret_versions(orders.secrets_folder)
        self._server = HttpServer.bind(*orders.listen)

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
        """The server, and what is watched, while the block lasts."""
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
            _stop_on_signals(self.stop)  # before anybody is told that there is something to stop
            await self._server.start(surface)
            names = [each.name for each in self.relays]
            log.info("Listening.", extra={"address": self._server.address, "id": orders.relay_id, "relays": names})
            if orders.secrets_folder is not None:
                # The last thing before relays begin: news that they get before that does not count for them.
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
        """A watch that failed in a way that nobody thought of: better to be started anew than to go on half blind."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("Something that should be watched is not any more.", exc_info=error)
            self.stop.set()

    async def _secrets_changed(self) -> None:
        for relay in self.relays:
            relay.refresh()
        self.secret_versions = secret_versions(self.orders.secrets_folder)


async def run_fixed(orders: Orders, manifests: Manifests) -> None:
    """Relays for all manifests, until told to stop."""
    async with Process(orders) as process:
        served = outboxes_of(manifests, orders.secrets)
        for outbox in served:
            # Two relays of one process may share a database, in which ids are unique.
            relay_id = orders.relay_id if len(served) == 1 else f"{orders.relay_id}/{full_name(outbox.relay)}"
            config = Configuration(outbox.relay, outbox.subscriptions)
            process.relays.append(process.relay(config, relay_id, follows=False))
        async with process.afloat(None):
            await _run_all(process.relays, process.stop)


async def run_following(orders: Orders) -> None:
    """One relay, as soon as there is a configuration, until told to stop."""
    arrived = asyncio.Event()
    async with Process(orders) as process:

        def take(config: Configuration) -> None:
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
    """An assignment goes to the relay that has the subscription."""

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
    """Until all have stopped. One that gives up stops the others, in good order, and is the reason in the end."""

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
