"""Schema and maintenance of the outbox.

Before a session, the schema is migrated or verified (`SchemaGate`). During a session, `Maintenance` creates time
partitions ahead and drops old ones once all subscriptions have passed them. It also examines the filters of the
subscriptions and the oldest snapshot of the database. The results are in the status, in metrics and, once per change,
in the log. Any relay may do both. The connection is open only during a round. A failure never stops delivery.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from mailboat.errors import MailboatError
from mailboat.store.connection import PostgresConnection, UrlProvider, explained
from mailboat.store.examination import Coverage, OldSnapshot, SnapshotWatch, coverage
from mailboat.store.schema.migrate import MigrationReport, apply_migrations
from mailboat.store.schema.time_partitions import HardLimit, RetentionSweep, days_ahead, ensure_partitions, server_time
from mailboat.store.schema.verify import verify_or_refuse
from mailboat.store.subscription_rows import clear_expired
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import EventSubscription, OutboxRelaySpec, Pooler, Retention

log = logging.getLogger(__name__)

_EVERY = 3600.0
"""Seconds between rounds."""
_RETRY_EVERY = 60.0
_EXAMINE_EVERY = 60.0
_WITHIN = 600.0
"""Seconds after which a round is cancelled, because the server may have stopped answering."""
_CLOCKS_DIFFER_BY = timedelta(hours=1)
"""Clock difference from which the status reports it."""


@dataclass(eq=False)
class SchemaGate:
    """The schema of one relay's outbox: migrated, or only verified if the relay does not manage it.

    A relay may have to wait for a migration started by another relay or a person, or for a server that does not answer.
    It reports the reason of the wait, and a stop request ends the wait (`shutdown.unless_stopped`).
    """

    relay: str
    report_wait: Callable[[str], None]
    ready: bool = False
    missing_roles: str = ""
    """SQL that creates group roles which the relay's user may not create; empty if none is missing."""
    migrating: bool = False
    """Whether migrations are being applied. If cancelled, the next relay would have to start them again."""

    async def prepare(self, url: UrlProvider, spec: OutboxRelaySpec, deadline: float) -> None:
        """Migrate or verify the schema. Raise ``SchemaMismatch`` if a person has to act."""
        link = await PostgresConnection.open(url, "schema", deadline=deadline, pooler=spec.database.pooler)
        table, waits, begins = spec.outbox.table, self.report_wait, self._begins
        try:
            if spec.outbox.manage_schema:
                report = await apply_migrations(link.connection, table, deadline=deadline, waits=waits, begins=begins)
                if report.applied:
                    log.info("Schema migrated.", extra={"relay": self.relay, "applied": list(report.applied)})
                self._note_roles(report)
            else:
                async with explained(link.connection, deadline):
                    await verify_or_refuse(link.connection, TableLayout(table, renamed(spec.outbox.columns)))
            self.ready = True
        except MailboatError:
            self.ready = False
            raise
        finally:
            self.migrating = False
            await link.close()

    def _note_roles(self, report: MigrationReport) -> None:
        remedy = report.sql_for_an_administrator
        if remedy and remedy != self.missing_roles:
            log.warning(
                "Roles are missing that this user may not create; an administrator should run: %s",
                " ".join(remedy.split()),
                extra={"relay": self.relay, "roles": list(report.missing_roles)},
            )
        self.missing_roles = remedy

    def _begins(self, step: str) -> None:
        self.migrating = True
        self.report_wait(f"migration {step} is being applied")


@dataclass
class RetentionClock:
    """Clock for retention: a clock that jumps forward must not expire the time partition that is being written to.

    The time is the earliest of the database's clock, this machine's clock, and earlier readings of both plus the time
    elapsed since. If a clock was slow and is corrected, retention stays late until the process ends. The only effect is
    that events are kept longer.
    """

    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic
    _started: datetime | None = None
    """Time at which the monotonic clock was zero."""

    def now(self, server: datetime) -> datetime:
        """Return the retention time, given the database's time ``server``."""
        passed = timedelta(seconds=self.monotonic())
        started = min(server, self.wall()) - passed
        self._started = started if self._started is None else min(self._started, started)
        return self._started + passed


@dataclass
class Maintenance:
    """Maintenance and examination of one outbox, with the results of the last rounds."""

    url: UrlProvider
    layout: TableLayout
    retention: Retention
    pooler: Pooler
    clock: RetentionClock = field(default_factory=RetentionClock)
    """Must outlive this maintenance, which may end with a connection."""
    days_ahead: float | None = None
    blocked: str | None = None
    error: str | None = None
    """Reason why the last maintenance failed; None if it succeeded."""
    coverage: Coverage = field(default_factory=Coverage)
    snapshot: OldSnapshot = field(default_factory=OldSnapshot)

    @property
    def _about(self) -> dict[str, str]:
        return {"outbox": self.layout.table}

    async def run(self) -> None:
        while True:
            try:
                async with explained(None, _WITHIN):
                    await self._round()
                self.error = None
            except MailboatError as error:
                self.error = str(error)
                log.warning("Upkeep of the outbox failed; it will be tried again: %s", error, extra=self._about)
            await asyncio.sleep(_EVERY if self.error is None else _RETRY_EVERY)

    async def _round(self) -> None:
        async with await PostgresConnection.open(self.url, "maintenance", pooler=self.pooler) as link:
            # Query this first: the remaining days matter most if creating time partitions fails.
            self.days_ahead = await days_ahead(link.connection, self.layout.table)
            await ensure_partitions(link.connection, self.layout.table)
            self.days_ahead = await days_ahead(link.connection, self.layout.table)
            for name in await clear_expired(link, self.layout.table):
                log.info("Progress of a deleted subscription removed", extra={"subscription": name})
            server = await server_time(link.connection)
            now = self.clock.now(server)
            after, limit = limits(self.retention, now)
            report = await RetentionSweep(link.connection, self.layout, after, now=now, limit=limit).run()
            blocked: list[str] = []
            if server - now >= _CLOCKS_DIFFER_BY:
                blocked.append(
                    f"the database's clock says {server:%Y-%m-%d %H:%M} UTC, and this relay's says"
                    f" {now:%Y-%m-%d %H:%M}: retention goes by the earlier time. Set the clock that is wrong, then"
                    " restart the relay",
                )
            self.blocked = "; ".join([*blocked, *map(str, report.blocked)]) or None
            for lost in report.lost:
                log.error("Undelivered events were dropped by the retention limit.", extra={"lost": str(lost)})
            if report.dropped:
                log.info("Old partitions dropped.", extra={**self._about, "partitions": list(report.dropped)})
                # After a drop, make sure that writers have a time partition.
                await ensure_partitions(link.connection, self.layout.table)
                self.days_ahead = await days_ahead(link.connection, self.layout.table)

    async def examine(
        self, subscriptions: Callable[[], Sequence[EventSubscription]], every: float = _EXAMINE_EVERY
    ) -> None:
        snapshots, logged = SnapshotWatch(), frozenset[str]()
        while True:
            await asyncio.sleep(every)
            try:
                async with await PostgresConnection.open(self.url, "coverage", pooler=self.pooler) as link:
                    before, self.snapshot = self.snapshot, await snapshots.oldest(link)
                    if self.snapshot.warning and not before.warning:
                        log.warning("Old snapshot: %s", self.snapshot.warning, extra=self._about)
                    self.coverage = await coverage(link, self.layout, subscriptions())
            except MailboatError as error:
                log.debug("The outbox was not examined: %s", error)
                continue
            subjects = frozenset((*self.coverage.unmatched, *self.coverage.idle))
            if subjects - logged:
                for remark in self.coverage.remarks():
                    log.warning("Probably a mistake in a filter: %s", remark, extra=self._about)
            logged = subjects


def limits(retention: Retention, now: datetime) -> tuple[datetime, HardLimit]:
    """Convert ``spec.outbox.retention`` to points in time."""
    after = now - timedelta(seconds=retention.after.seconds)
    if retention.policy == "Hold":
        return after, HardLimit()
    oldest = now - timedelta(seconds=retention.max_age.seconds) if retention.max_age else None
    return after, HardLimit(oldest, retention.max_bytes.bytes if retention.max_bytes else None)
