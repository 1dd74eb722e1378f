"""``Consumer``: registers handlers and runs them."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mailboat.consumer.arguments import Inbox, Kafka, PubSub, Redis
from mailboat.consumer.consumer_settings import (
    BrokerSettings,
    ConsumerSettings,
    Paths,
    from_arguments,
    from_manifests,
    from_source,
)
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import handler
from mailboat.consumer.points import Passing, ignore_point
from mailboat.consumer.pull_source import Pace
from mailboat.errors import ConfigError
from mailboat.runtime.gc_settings import configure_gc
from mailboat.runtime.shutdown import exit_on_signals
from mailboat_spec.stop_signals import stop_on_signals

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

MANIFESTS = "MAILBOAT_MANIFESTS"
"""Environment variable with the path of the manifests, used if the program sets none."""


class Runner(Protocol):
    """Life of a consumer for one kind of source."""

    async def serve(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set or the task is cancelled, then drain."""


class Consumer:
    """The handlers of one subscription, and the process that runs them.

    ``manifests``: files or folders with the EventSubscription and, if it reads an outbox, its OutboxRelay. The default
    is the environment variable ``MAILBOAT_MANIFESTS``, unless other arguments name an outbox or a broker:

    - ``url`` (or ``engine`` of SQLAlchemy): the database of the outbox. Without ``spec``, the subscription must already
      be declared.
    - ``source``: a broker, with ``idempotency`` (None: redelivered events are handled again) and ``dead_letter``, the
      topic of dead letters.

    ``spec`` has further fields of the subscription's spec, as in a manifest.
    """

    def __init__(
        self,
        name: str,
        *,
        manifests: Paths | None = None,
        url: str | None = None,
        engine: Any = None,
        spec: Mapping[str, Any] | None = None,
        outbox: str | None = None,
        source: Kafka | PubSub | None = None,
        idempotency: Redis | Inbox | None = None,
        dead_letter: str | None = None,
        concurrency: int | None = None,
        listen: str | None = None,
        instance: str | None = None,
        pace: Pace | None = None,
        passing: Passing = ignore_point,
    ) -> None:
        """``concurrency``: outbox: concurrent transactions, each with its own partition and connection (default 4);
        broker: events of different keys that are handled at the same time (default 32). ``listen``: address of /livez,
        /readyz, /status and /metrics, for example ``:8080``; None disables them. ``instance``: name that a restarted
        process keeps and no other process has; then it takes over its own claims at once."""
        self.name = name
        self.dispatcher = Dispatcher(name)
        self.instance = instance or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self._manifests = manifests
        self._url = url
        self._engine = engine
        self._spec = spec
        self._outbox = outbox
        self._source = source
        self._idempotency = idempotency
        self._dead_letter = dead_letter
        self._given_instance = instance
        self._concurrency = concurrency
        self._listen = listen
        self._pace = pace
        self._passing = passing
        self._secrets_dir: Path | None = None
        self._size: int | None = None
        self._group_by: tuple[str, ...] | None = None

    def configure(
        self,
        *,
        manifests: Paths | None = None,
        secrets_dir: Path | None = None,
        listen: str | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Override settings of the constructor. None keeps the current value."""
        self._manifests = manifests or self._manifests
        self._secrets_dir = secrets_dir or self._secrets_dir
        self._listen = listen or self._listen
        self._concurrency = concurrency or self._concurrency

    # -- registration ------------------------------------------------------------------------------------------------

    def on(self, *patterns: str) -> Callable[[Function], Function]:
        """Run the function for every event whose type matches one of the patterns (``*`` and ``?``)."""

        def register(function: Function) -> Function:
            for pattern in patterns:
                self.dispatcher.add(handler(pattern, function))
            return function

        return register

    def batch(
        self, *patterns: str, group_by: str | Sequence[str] | None = None, size: int | None = None
    ) -> Callable[[Function], Function]:
        """Run the function for lists of events in one transaction. With ``group_by`` each list is a whole group."""
        if group_by is not None:
            fields = (group_by,) if isinstance(group_by, str) else tuple(group_by)
            if self._group_by not in (None, fields):
                raise ConfigError(f"consumer {self.name}: group_by is {fields} here and {self._group_by} elsewhere")
            self._group_by = fields
        self._size = size or self._size

        def register(function: Function) -> Function:
            for pattern in patterns:
                self.dispatcher.add(handler(pattern, function, batch=True))
            return function

        return register

    # -- life --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle events until SIGTERM or SIGINT, then finish batches in flight. A second signal exits at once."""
        with exit_on_signals():
            configure_gc()
            asyncio.run(self.run_until_signalled())

    async def run_until_signalled(self) -> None:
        """Coroutine version of ``run``."""
        stop = asyncio.Event()
        stop_on_signals(stop, log, consumer=self.name)
        await self.serve(stop)

    async def serve(self, stop: asyncio.Event | None = None) -> None:
        """Handle events in a running event loop, such as FastAPI's, until ``stop`` is set or the task is cancelled."""
        stop = stop or asyncio.Event()
        settings = await asyncio.to_thread(self._settings)
        if not stop.is_set():
            await self._runner(settings).serve(stop)

    # -- configuration -----------------------------------------------------------------------------------------------

    def _runner(self, settings: ConsumerSettings | BrokerSettings) -> Runner:
        if isinstance(settings, BrokerSettings):
            from mailboat.consumer.broker.runner import BrokerRunner

            return BrokerRunner(
                self.dispatcher,
                settings,
                reread=self._settings,
                instance=self.instance,
                claims_instance=self._given_instance,
                concurrency=self._concurrency,
                listen=self._listen,
            )
        from mailboat.consumer.pull_runner import PullRunner

        return PullRunner(
            self.dispatcher,
            settings,
            self._pull_settings,
            instance=self.instance,
            concurrency=self._concurrency or 4,
            engine=self._engine,
            size=self._size,
            group_by=self._group_by,
            listen=self._listen,
            pace=self._pace,
            passing=self._passing,
        )

    def _pull_settings(self) -> ConsumerSettings:
        settings = self._settings()
        assert isinstance(settings, ConsumerSettings), "the kind of source does not change"
        return settings

    def _settings(self) -> ConsumerSettings | BrokerSettings:
        if not self.dispatcher.handlers:
            raise ConfigError(f"consumer {self.name} has no handlers: register one with @consumer.on(...)")
        if self._source is not None:
            return from_source(self.name, self._source, self._idempotency, self._dead_letter, self._spec)
        if self._idempotency is not None or self._dead_letter is not None:
            raise ConfigError(f"consumer {self.name}: idempotency= and dead_letter= are for source= only")
        manifests = self._manifests or (None if self._url or self._engine is not None else os.environ.get(MANIFESTS))
        url = self._url or (None if self._engine is None else self._engine.url.render_as_string(hide_password=False))
        if manifests is not None:
            return from_manifests(self.name, manifests, url, self._secrets_dir)
        spec = self._spec
        if spec is not None and self._group_by is not None:
            spec = {**spec, "delivery": {"groupBy": list(self._group_by), **spec.get("delivery", {})}}
        settings = from_arguments(self.name, url or os.environ.get("DATABASE_URL"), spec, self._outbox)
        if settings.url is None:
            raise ConfigError(
                f"consumer {self.name}: where are its events? Give manifests=, url=, engine= or source=, or set"
                f" {MANIFESTS} or DATABASE_URL."
            )
        return settings
