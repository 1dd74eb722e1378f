"""Life of a pull consumer: declares the subscription, opens connections, runs the workers, reports the status."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from mailboat.consumer.consumer_settings import ConsumerSettings
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.monitor import ConsumerLag, Monitor
from mailboat.consumer.points import Passing, ignore_point
from mailboat.consumer.pull_source import RECONNECT, Pace, PullSource, WakeUp
from mailboat.consumer.pull_statements import PullArguments
from mailboat.consumer.session_factory import SessionFactory, libpq_url
from mailboat.consumer.status_server import run_with_status
from mailboat.consumer.transactions import error_message
from mailboat.errors import ConfigError, DatabaseUnavailable
from mailboat.runtime.shutdown import StopRequested, unless_stopped
from mailboat_spec import NoHandler
from mailboat_spec.consumer_report import ConsumerReport

log = logging.getLogger(__name__)


class PullRunner:
    """Runs the handlers of one pull subscription."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: ConsumerSettings,
        read_settings: Callable[[], ConsumerSettings],
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
        self._read_settings = read_settings
        self._settings = settings
        self._concurrency = concurrency
        self._engine = engine
        self._size = size
        self._group_by = group_by
        self._listen = listen
        self._pace = pace
        self._passing = passing
        self._stop = asyncio.Event()
        self._wake = WakeUp()
        self._source: PullSource | None = None
        self._watch: Monitor | None = None
        self._error: str | None = None
        """Why the database is not reached at the start."""

    async def serve(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set, then finish batches in flight."""
        self._stop = stop
        await run_with_status(self._listen, self.report, self._run(stop), stop, self._wake.set)

    async def _run(self, stop: asyncio.Event) -> None:
        kind = self.dispatcher.transaction_kind()
        try:
            policy = await unless_stopped(stop, self._prepare())
        except StopRequested:
            return
        settings = self._settings
        self._check_groups(policy)
        self.dispatcher.no_handler = NoHandler(policy["noHandler"])
        arguments = PullArguments(settings.subscription, self._size, settings.outbox)
        sessions = SessionFactory(kind, settings.url, arguments, size=self._concurrency, engine=self._engine)
        self._source = PullSource(
            self.dispatcher,
            sessions.open,
            workers=max(1, min(self._concurrency, policy["partitions"])),
            pace=self._pace,
            wake=self._wake,
            passing=self._passing,
        )
        self._watch = Monitor(
            libpq_url(settings.url), settings.subscription, self.instance, self._wake, outbox=settings.outbox
        )
        background = [asyncio.create_task(_maintenance(settings, policy).run()), asyncio.create_task(self._watch.run())]
        log.info("Consuming.", extra={"consumer": settings.subscription, "instance": self.instance})
        try:
            await self._source.run(stop)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await sessions.close()

    def report(self) -> ConsumerReport:
        """Return the status from values in memory."""
        lag = ConsumerLag() if self._watch is None else self._watch.lag
        connected = 0 if self._source is None else self._source.connected
        error = self._error if self._source is None else self._source.error
        counts = self.dispatcher.counts
        return ConsumerReport(
            name=self._settings.subscription,
            instance=self.instance,
            state="Stopping" if self._stop.is_set() else "Running" if connected else "Connecting",
            message=error or "",
            workers=connected,
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

    async def _prepare(self) -> dict[str, Any]:
        """Declare the subscription and return its settings in the database. If the database is unavailable, retry with
        back-off; manifests and secrets are read again for each attempt."""
        failures, random = 0, Random()
        while True:
            try:
                await self._declare(self._settings)
                return await self._read_policy(self._settings)
            except DatabaseUnavailable as error:
                failures += 1
                if self._error != str(error):
                    log.warning("Database unavailable: %s", error, extra={"consumer": self._settings.subscription})
                self._error = str(error)
            await asyncio.sleep(RECONNECT.delay(failures, random))
            self._settings = await asyncio.to_thread(self._read_settings)

    async def _declare(self, settings: ConsumerSettings) -> None:
        """Declare the subscription. Without the privilege, the subscription must already exist."""
        if settings.resource is None:
            return
        import psycopg

        from mailboat.store.connection import PostgresConnection
        from mailboat.store.subscription_rows import declare_pulled

        link = await PostgresConnection.open(lambda: libpq_url(settings.url), "declare")
        try:
            await declare_pulled(link, settings.layout, [settings.resource])
        except psycopg.errors.InsufficientPrivilege:
            log.debug("The subscription is not declared by this user.", extra={"consumer": settings.subscription})
        finally:
            await link.close()

    async def _read_policy(self, settings: ConsumerSettings) -> dict[str, Any]:
        """Return the subscription's settings from the database."""
        import psycopg

        try:
            async with await psycopg.AsyncConnection.connect(libpq_url(settings.url), connect_timeout=10) as connection:
                cursor = await connection.execute(
                    "select mailboat.consumer_settings(%s, %s)", [settings.subscription, settings.outbox]
                )
                row = await cursor.fetchone()
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(f"consumer {self.name}: {error_message(error)}") from error
        except psycopg.Error as error:
            raise ConfigError(f"consumer {self.name}: {error_message(error)}") from error
        assert row is not None, "a function has an answer"
        policy: dict[str, Any] = row[0]
        return policy

    def _check_groups(self, policy: Mapping[str, Any]) -> None:
        if self._group_by is not None and list(self._group_by) != policy["groupBy"]:
            fields = ", ".join(self._group_by)
            raise ConfigError(
                f"consumer {self.name}: its handlers want groups by {fields}: the subscription must have"
                f" delivery: {{groupBy: [{fields}]}}"
            )


def _maintenance(settings: ConsumerSettings, policy: Mapping[str, Any]) -> Any:
    """Return the retention task, since there may be no relay.

    Does nothing without an OutboxRelay manifest, or if the user is not in the role that owns the schema.
    """
    from mailboat.runtime.maintenance import Maintenance

    relay = settings.relay
    if relay is None or not policy["isOwner"]:
        return _NoMaintenance()
    url = libpq_url(settings.url)
    return Maintenance(lambda: url, settings.layout, relay.spec.outbox.retention, relay.spec.database.pooler)


class _NoMaintenance:
    async def run(self) -> None:
        """Do nothing: this consumer does not run retention."""
