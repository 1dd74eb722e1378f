"""Keeps the outbox in order: time partitions made ahead, old ones dropped once everybody is past them.

Any relay may do it, and it takes a connection only while it does. A failure here never stops delivery: it is logged,
and shown in the status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from mailboat.errors import MailboatError
from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Link, UrlProvider, explained
from mailboat.outbox.partitions import HardLimit, days_ahead, drop_expired, ensure_partitions, server_time
from mailboat_spec import Pooler, Retention, RetentionPolicy

log = logging.getLogger(__name__)

EVERY = 3600.0
"""Seconds between rounds."""
AFTER_TROUBLE = 60.0
_WITHIN = 600.0
"""Seconds after which a round that came to no end is given up: the server may have gone deaf in the middle of it."""
_CLOCKS_DIFFER_BY = timedelta(hours=1)
"""What is worth a person's attention."""


@dataclass(slots=True)
class Upkeep:
    """What the last round found."""

    days_ahead: float | None = None
    blocked: str | None = None
    error: str | None = None
    """Why the last round came to no end; None when it did."""


class RetentionClock:
    """The time by which partitions are old: no clock that jumps forward makes the day that is being written to old.

    It is the earliest of the database's clock, this machine's clock, and what this process read from them before, plus
    the time that has passed since. A clock that was behind, and is right by now, makes retention late for as long as
    the process lives: events are kept longer, and nothing else.
    """

    def __init__(
        self,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._started: datetime | None = None
        """What time it was when the monotonic clock was at zero."""

    def now(self, server: datetime) -> datetime:
        """The time, where the database says that it is ``server``."""
        passed = timedelta(seconds=self._monotonic())
        started = min(server, self._wall()) - passed
        self._started = started if self._started is None else min(self._started, started)
        return self._started + passed


class Janitor:
    """The upkeep of one outbox."""

    def __init__(
        self,
        url: UrlProvider,
        layout: Layout,
        retention: Retention,
        pooler: Pooler,
        clock: RetentionClock | None = None,
    ) -> None:
        """``clock``: one that lives longer than this janitor, which may end with a connection."""
        self.upkeep = Upkeep()
        self._url = url
        self._layout = layout
        self._about = {"outbox": layout.table}
        self._retention = retention
        self._pooler = pooler
        self._clock = clock or RetentionClock()

    async def run(self) -> None:
        """Rounds until cancelled."""
        while True:
            try:
                async with explained(None, _WITHIN):
                    await self._round()
                self.upkeep.error = None
                pause = EVERY
            except MailboatError as error:
                self.upkeep.error = str(error)
                log.warning("Upkeep of the outbox failed; it will be tried again: %s", error, extra=self._about)
                pause = AFTER_TROUBLE
            await asyncio.sleep(pause)

    async def _round(self) -> None:
        link = await Link.open(self._url, "janitor", pooler=self._pooler)
        try:
            # Asked before anything is tried: what is left counts most where no more can be made.
            self.upkeep.days_ahead = await days_ahead(link.connection, self._layout.table)
            await self._supply(link)
            server = await server_time(link.connection)
            now = self._clock.now(server)
            after, limit = limits(self._retention, now)
            report = await drop_expired(link.connection, self._layout, after, now=now, limit=limit)
            self.upkeep.blocked = "; ".join([*_ahead(server, now), *map(str, report.blocked)]) or None
            for lost in report.lost:
                log.error("Undelivered events were dropped by the retention limit.", extra={"lost": str(lost)})
            if report.dropped:
                log.info("Old partitions dropped.", extra={**self._about, "partitions": list(report.dropped)})
                await self._supply(link)  # whatever was taken away, writers have somewhere to go
        finally:
            await link.close()

    async def _supply(self, link: Link) -> None:
        self.upkeep.days_ahead = (await ensure_partitions(link.connection, self._layout.table)).days_ahead


def _ahead(server: datetime, now: datetime) -> list[str]:
    if server - now < _CLOCKS_DIFFER_BY:
        return []
    return [
        f"the database's clock says {server:%Y-%m-%d %H:%M} UTC, and this relay's says {now:%Y-%m-%d %H:%M}: retention"
        " goes by the earlier time. Set the clock that is wrong, then restart the relay"
    ]


def limits(retention: Retention, now: datetime) -> tuple[datetime, HardLimit | None]:
    """``spec.outbox.retention`` as points in time."""
    after = now - timedelta(seconds=retention.after.seconds)
    if retention.policy is RetentionPolicy.HOLD:
        return after, None
    oldest = now - timedelta(seconds=retention.max_age.seconds) if retention.max_age else None
    return after, HardLimit(oldest, retention.max_bytes.bytes if retention.max_bytes else None)
