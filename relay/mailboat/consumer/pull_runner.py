"""Life of a pull consumer: declares the subscription, opens connections, runs the workers, reports the status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.points import Passing, ignore_point
from mailboat.consumer.pull_source import Pace, PullSource, WakeUp
from mailboat.consumer.session_factory import SessionFactory, libpq_url
from mailboat.consumer.settings import ConsumerSettings
from mailboat.consumer.status import run_with_status
from mailboat.consumer.transactions import Wanted
from mailboat.errors import ConfigError
from mailboat.runtime.shutdown import unless_stopped
from mailboat_spec import NoHandler
from mailboat_spec.consumer_report import ConsumerReport

log = logging.getLogger(__name__)


class PullRunner:
    """Runs the handlers of one pull subscription."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: ConsumerSettings,
        *,
        instance: str,
        concurrency: int,
        engine: Any = None,
        size: int | None = None,
        group_by: tuple[str, ...] | None = None,
        listen: str | None = None,
        pace: Pace | None = None,
        passing: Passing = ignore_point,
    ) -> None:
        self.dispatcher = dispatcher
        self.name = dispatcher.name
        self.instance = instance
        self._settings = settings
        self._concurrency = concurrency
        self._engine = engine
        self._size = size
        self._group_by = group_by
        self._listen = listen
        self._pace = pace
        self._passing = passing

    async def serve(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set, then finish batches in flight."""
        settings = self._settings
        kind = self.dispatcher.transaction_kind()
        known = await unless_stopped(stop, self._prepare(settings))
        if known is None:
            return
        wake = WakeUp()
        self._check_groups(known)
        self.dispatcher.no_handler = NoHandler(known["noHandler"])
        wanted = Wanted(settings.subscription, self._size, settings.outbox)
        sessions = SessionFactory(kind, settings.url, wanted, size=self._concurrency, engine=self._engine)
        source = PullSource(
            self.dispatcher,
            sessions.open,
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
            await sessions.close()

    async def _serve(self, source: PullSource, settings: ConsumerSettings, wake: WakeUp, stop: asyncio.Event) -> None:
        from mailboat.consumer.watch import Watch

        watch = Watch(libpq_url(settings.url), settings.subscription, self.instance, wake, outbox=settings.outbox)
        watching = asyncio.create_task(watch.run())

        def report() -> ConsumerReport:
            lag, counts = watch.lag, self.dispatcher.counts
            state = "Stopping" if stop.is_set() else "Running" if source.connected else "Connecting"
            return ConsumerReport(
                name=settings.subscription,
                instance=self.instance,
                state=state,
                message=source.trouble or "",
                workers=source.connected,
                lag=lag.pending,
                lag_bounded=lag.bounded,
                oldest_age=lag.oldest,
                parked=lag.parked,
                dead=lag.dead,
                handled=counts.handled,
                ignored=counts.ignored,
                refused=counts.refused,
                redelivered=counts.redelivered,
                last_error=counts.last_error,
            )

        log.info("Consuming.", extra={"consumer": settings.subscription, "instance": self.instance})
        try:
            await run_with_status(self._listen, report, source.run(stop), stop, wake.ring)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _prepare(self, settings: ConsumerSettings) -> dict[str, Any]:
        await self._declare(settings)
        return await self._known(settings)

    async def _declare(self, settings: ConsumerSettings) -> None:
        """Declare the subscription. Without the privilege, the subscription must already exist."""
        if settings.resource is None:
            return
        import psycopg

        from mailboat.outbox.declaring import declare_pulled
        from mailboat.outbox.link import Link

        link = await Link.open(lambda: libpq_url(settings.url), "declare")
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
            async with await psycopg.AsyncConnection.connect(libpq_url(settings.url), connect_timeout=10) as connection:
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


def _janitor(settings: ConsumerSettings, known: Mapping[str, Any]) -> Any:
    """Return the retention task, since there may be no relay.

    Does nothing without an OutboxRelay manifest, or if the user is not in the role that owns the schema.
    """
    from mailboat.runtime.janitor import Janitor

    relay = settings.relay
    if relay is None or not known["isOwner"]:
        return _Nothing()
    url = libpq_url(settings.url)
    return Janitor(lambda: url, settings.layout, relay.spec.outbox.retention, relay.spec.database.pooler)


class _Nothing:
    async def run(self) -> None:
        """Do nothing: this consumer does not run retention."""
