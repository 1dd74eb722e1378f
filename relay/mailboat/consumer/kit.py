"""``Consumer``: registers handlers and runs them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import TransactionKind, handler
from mailboat.consumer.pull_source import Pace, Passing, PullSource, WakeUp, unheard
from mailboat.consumer.settings import ConsumerSettings, Paths, from_arguments, from_manifests
from mailboat.consumer.transactions import Psycopg, PsycopgAsync, Session, SqlAlchemy, SqlAlchemyAsync, Wanted
from mailboat.errors import ConfigError
from mailboat_spec import NoHandler

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

MANIFESTS = "MAILBOAT_MANIFESTS"
"""Environment variable with the path of the manifests, used if the program sets none."""


class Consumer:
    """The handlers of one subscription, and the process that runs them.

    ``manifests``: files or folders with the EventSubscription and its OutboxRelay; without ``url`` and ``engine`` the
    default is the environment variable ``MAILBOAT_MANIFESTS``. Without manifests, ``url`` (or ``engine`` of SQLAlchemy)
    is the database, and ``spec`` the subscription's spec as in a manifest. Without ``spec``, the subscription must
    already be declared.
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
        concurrency: int = 4,
        listen: str | None = None,
        instance: str | None = None,
        pace: Pace | None = None,
        passing: Passing = unheard,
    ) -> None:
        """``concurrency``: number of concurrent transactions, each with its own partition and connection.
        ``listen``: address of /livez, /readyz, /status and /metrics, for example ``:8080``; None disables them."""
        self.name = name
        self.dispatcher = Dispatcher(name)
        self.instance = instance or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self._manifests = manifests
        self._url = url
        self._engine = engine
        self._spec = spec
        self._outbox = outbox
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
            wanted = (group_by,) if isinstance(group_by, str) else tuple(group_by)
            if self._group_by not in (None, wanted):
                raise ConfigError(f"consumer {self.name}: group_by is {wanted} here and {self._group_by} elsewhere")
            self._group_by = wanted
        self._size = size or self._size

        def register(function: Function) -> Function:
            for pattern in patterns:
                self.dispatcher.add(handler(pattern, function, batch=True))
            return function

        return register

    # -- life --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle events until SIGTERM or SIGINT, then finish batches in flight. A second signal exits at once."""
        asyncio.run(self.run_until_signalled())

    async def run_until_signalled(self) -> None:
        """Coroutine version of ``run``."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def told(number: int) -> None:
            if stop.is_set():
                os._exit(128 + number)
            log.info("Stopping: batches in hand are finished.", extra={"consumer": self.name})
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told, number)
        await self.serve(stop)

    async def serve(self, stop: asyncio.Event | None = None) -> None:
        """Handle events in a running event loop, such as FastAPI's, until ``stop`` is set or the task is cancelled."""
        stop = stop or asyncio.Event()
        kind = self.dispatcher.transaction_kind()
        settings = await asyncio.to_thread(self._settings)
        await self._declare(settings)
        wake = WakeUp()
        engine, owned = self._find_engine(kind, settings.url)
        known = await self._known(settings)
        self._check_groups(known)
        self.dispatcher.no_handler = NoHandler(known["noHandler"])
        wanted = Wanted(settings.subscription, self._size, settings.outbox)
        source = PullSource(
            self.dispatcher,
            _opener(kind, settings.url, engine, wanted),
            workers=max(1, min(self._concurrency, known["partitions"])),
            pace=self._pace,
            wake=wake,
            passing=self._passing,
        )
        upkeep = asyncio.create_task(_janitor(settings, known).run())
        try:
            await self._serve(source, settings, wake, stop)
        finally:
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            if owned:
                await _dispose(engine)

    async def _serve(self, source: PullSource, settings: ConsumerSettings, wake: WakeUp, stop: asyncio.Event) -> None:
        from mailboat.consumer.status import Health
        from mailboat.consumer.watch import Watch

        watch = Watch(_libpq_url(settings.url), settings.subscription, self.instance, wake, outbox=settings.outbox)
        watching = asyncio.create_task(watch.run())
        health = Health(settings.subscription, self.instance, source, watch, self.dispatcher.counts, stop)
        server = await health.listen(self._listen) if self._listen else None
        log.info("Consuming.", extra={"consumer": settings.subscription, "instance": self.instance})
        work = asyncio.create_task(source.run(stop))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            wake.ring()
            await work
            raise
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            if server is not None:
                await server.close()

    # -- configuration -----------------------------------------------------------------------------------------------

    def _settings(self) -> ConsumerSettings:
        if not self.dispatcher.handlers:
            raise ConfigError(f"consumer {self.name} has no handlers: register one with @consumer.on(...)")
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
                f"consumer {self.name}: where is its database? Give manifests=, url= or engine=, or set {MANIFESTS} or"
                " DATABASE_URL."
            )
        return settings

    async def _declare(self, settings: ConsumerSettings) -> None:
        """Declare the subscription. Without the privilege, the subscription must already exist."""
        if settings.resource is None:
            return
        import psycopg

        from mailboat.outbox.declaring import declare_pulled
        from mailboat.outbox.link import Link

        link = await Link.open(lambda: _libpq_url(settings.url), "declare")
        try:
            await declare_pulled(link, settings.layout, [settings.resource])
        except psycopg.errors.InsufficientPrivilege:
            log.debug("The subscription is not declared by this user.", extra={"consumer": settings.subscription})
        finally:
            await link.close()

    async def _known(self, settings: ConsumerSettings) -> dict[str, Any]:
        """Return the subscription's settings from the database."""
        import psycopg

        from mailboat.consumer.transactions import told
        from mailboat.errors import DatabaseUnavailable

        try:
            async with await psycopg.AsyncConnection.connect(
                _libpq_url(settings.url), connect_timeout=10
            ) as connection:
                cursor = await connection.execute(
                    "select mailboat.consumer_settings(%s, %s)", [settings.subscription, settings.outbox]
                )
                row = await cursor.fetchone()
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(f"consumer {self.name}: {told(error)}") from error
        except psycopg.Error as error:
            raise ConfigError(f"consumer {self.name}: {told(error)}") from error
        assert row is not None, "a function has an answer"
        known: dict[str, Any] = row[0]
        return known

    def _check_groups(self, known: Mapping[str, Any]) -> None:
        if self._group_by is not None and list(self._group_by) != known["groupBy"]:
            wanted = ", ".join(self._group_by)
            raise ConfigError(
                f"consumer {self.name}: its handlers want groups by {wanted}: the subscription must have"
                f" delivery: {{groupBy: [{wanted}]}}"
            )

    def _find_engine(self, kind: TransactionKind | None, url: str | None) -> tuple[Any, bool]:
        """Return SQLAlchemy's engine, and whether it was created here."""
        if kind is None or kind.vendor != "sqlalchemy":
            return None, False
        if self._engine is not None:
            return self._engine, False
        from sqlalchemy import create_engine, make_url
        from sqlalchemy.ext.asyncio import create_async_engine

        target = make_url(url or "")
        if "+" not in target.drivername:
            target = target.set(drivername="postgresql+psycopg")
        size = {"pool_size": self._concurrency, "max_overflow": 0}
        return (create_async_engine if kind.is_async else create_engine)(target, **size), True


def _janitor(settings: ConsumerSettings, known: Mapping[str, Any]) -> Any:
    """Return the retention task, since there may be no relay.

    Does nothing without an OutboxRelay manifest, or if the user is not in the role that owns the schema.
    """
    from mailboat.runtime.janitor import Janitor

    relay = settings.relay
    if relay is None or not known["isOwner"]:
        return _Nothing()
    url = _libpq_url(settings.url)
    return Janitor(lambda: url, settings.layout, relay.spec.outbox.retention, relay.spec.database.pooler)


class _Nothing:
    async def run(self) -> None:
        """Do nothing: this consumer does not run retention."""


def _opener(
    kind: TransactionKind | None, url: str | None, engine: Any, wanted: Wanted
) -> Callable[[], Awaitable[Session]]:
    libpq = _libpq_url(url)
    if kind is None or kind is TransactionKind.PSYCOPG_ASYNC:
        return lambda: PsycopgAsync.open(libpq, wanted)
    if kind is TransactionKind.PSYCOPG:
        return lambda: Psycopg.open(libpq, wanted)
    if kind.is_async:
        return lambda: SqlAlchemyAsync.open(engine, wanted)
    return lambda: SqlAlchemy.open(engine, wanted)


def _libpq_url(url: str | None) -> str:
    """Return the URL without SQLAlchemy's driver suffix of the scheme, which libpq does not accept."""
    scheme, separator, rest = (url or "").partition("://")
    return f"{scheme.partition('+')[0]}{separator}{rest}"


async def _dispose(engine: Any) -> None:
    disposed = engine.dispose()
    if asyncio.iscoroutine(disposed):
        await disposed
