"""Maintenance of the outbox: create time partitions ahead, drop old ones once all subscriptions have passed them.

A relay also examines the outbox: the filters of its subscriptions, and the oldest snapshot of the database. The results
are in the status, in metrics and, once per change, in the log.

Any relay may run both. The connection is open only during a round. A failure never stops delivery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from mailboat.errors import MailboatError
from mailboat.store.connection import PostgresConnection, UrlProvider, explained
from mailboat.store.examination import Coverage, OldSnapshot, SnapshotWatch, coverage
from mailboat.store.schema.time_partitions import HardLimit, RetentionSweep, days_ahead, ensure_partitions, server_time
from mailboat.store.subscription_rows import clear_expired
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, Pooler, Retention, RetentionPolicy

log = logging.getLogger(__name__)

_EVERY = 3600.0
"""Seconds between rounds."""
_RETRY_EVERY = 60.0
_EXAMINE_EVERY = 60.0
_WITHIN = 600.0
"""Seconds after which a round is cancelled, because the server may have stopped answering."""
_CLOCKS_DIFFER_BY = timedelta(hours=1)
"""Clock difference from which the status reports it."""


class RetentionClock:
    """Clock for retention: a clock that jumps forward must not expire the time partition that is being written to.

    The time is the earliest of the database's clock, this machine's clock, and earlier readings of both plus the time
    elapsed since. If a clock was slow and is corrected, retention stays late until the process ends. The only effect is
    that events are kept longer.
    """

    def __init__(
        self,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._started: datetime | None = None
        """Time at which the monotonic clock was zero."""

    def now(self, server: datetime) -> datetime:
        """Return the retention time, given the database's time ``server``."""
        passed = timedelta(seconds=self._monotonic())
        started = min(server, self._wall()) - passed
        self._started = started if self._started is None else min(self._started, started)
        return self._started + passed


class Maintenance:
    """Maintenance and examination of one outbox, with the results of the last rounds."""

    def __init__(
        self,
        url: UrlProvider,
        layout: TableLayout,
        retention: Retention,
        pooler: Pooler,
        clock: RetentionClock | None = None,
    ) -> None:
        """``clock`` must outlive this maintenance, which may end with a connection."""
        self.days_ahead: float | None = None
        self.blocked: str | None = None
        self.error: str | None = None
        """Reason why the last maintenance failed; None if it succeeded."""
        self.coverage = Coverage()
        self.snapshot = OldSnapshot()
        self._url = url
        self._layout = layout
        self._about = {"outbox": layout.table}
        self._retention = retention
        self._pooler = pooler
        self._clock = clock or RetentionClock()

    async def run(self) -> None:
        """Run maintenance rounds until cancelled."""
        while True:
            try:
                async with explained(None, _WITHIN):
                    await self._round()
                self.error = None
                pause = _EVERY
            except MailboatError as error:
                self.error = str(error)
                log.warning("Upkeep of the outbox failed; it will be tried again: %s", error, extra=self._about)
                pause = _RETRY_EVERY
            await asyncio.sleep(pause)

    async def _round(self) -> None:
        link = await PostgresConnection.open(self._url, "maintenance", pooler=self._pooler)
        try:
            # Query this first: the remaining days matter most if creating time partitions fails.
            self.days_ahead = await days_ahead(link.connection, self._layout.table)
            await self._supply(link)
            for name in await clear_expired(link, self._layout.table):
                log.info("Progress of a deleted subscription removed", extra={"subscription": name})
            server = await server_time(link.connection)
            now = self._clock.now(server)
            after, limit = limits(self._retention, now)
            report = await RetentionSweep(link.connection, self._layout, after, now=now, limit=limit).run()
            blocked = [str(each) for each in report.blocked]
            if server - now >= _CLOCKS_DIFFER_BY:
                blocked.insert(
                    0,
                    f"the database's clock says {server:%Y-%m-%d %H:%M} UTC, and this relay's says"
                    f" {now:%Y-%m-%d %H:%M}: retention goes by the earlier time. Set the clock that is wrong, then"
                    " restart the relay",
                )
            self.blocked = "; ".join(blocked) or None
            for lost in report.lost:
                log.error("Undelivered events were dropped by the retention limit.", extra={"lost": str(lost)})
            if report.dropped:
                log.info("Old partitions dropped.", extra={**self._about, "partitions": list(report.dropped)})
                await self._supply(link)  # after a drop, make sure that writers have a time partition
        finally:
            await link.close()

    async def examine(
        self, subscriptions: Callable[[], Sequence[EventSubscription]], every: float = _EXAMINE_EVERY
    ) -> None:
        """Examine the outbox until cancelled."""
        snapshots, logged = SnapshotWatch(), frozenset[str]()
        while True:
            await asyncio.sleep(every)
            try:
                link = await PostgresConnection.open(self._url, "coverage", pooler=self._pooler)
                try:
                    before, self.snapshot = self.snapshot, await snapshots.oldest(link)
                    if self.snapshot.warning and not before.warning:
                        log.warning("Old snapshot: %s", self.snapshot.warning, extra=self._about)
                    self.coverage = await coverage(link, self._layout, subscriptions())
                finally:
                    await link.close()
            except MailboatError as error:
                log.debug("The outbox was not examined: %s", error)
                continue
            subjects = frozenset((*self.coverage.unmatched, *self.coverage.idle))
            if subjects - logged:
                for remark in self.coverage.remarks():
                    log.warning("Probably a mistake in a filter: %s", remark, extra=self._about)
            logged = subjects

    async def _supply(self, link: PostgresConnection) -> None:
        self.days_ahead = (await ensure_partitions(link.connection, self._layout.table)).days_ahead


def limits(retention: Retention, now: datetime) -> tuple[datetime, HardLimit | None]:
    """Convert ``spec.outbox.retention`` to points in time."""
    after = now - timedelta(seconds=retention.after.seconds)
    if retention.policy is RetentionPolicy.HOLD:
        return after, None
    oldest = now - timedelta(seconds=retention.max_age.seconds) if retention.max_age else None
    return after, HardLimit(oldest, retention.max_bytes.bytes if retention.max_bytes else None)
