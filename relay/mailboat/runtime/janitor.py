"""Keeps the outbox in order: time partitions made ahead, old ones dropped once everybody is past them.

Any relay may do it, and it takes a connection only while it does. A failure here never stops delivery: it is logged,
and shown in the status.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from mailboat.errors import MailboatError
from mailboat.outbox.link import Link, UrlProvider
from mailboat.outbox.partitions import HardLimit, drop_expired, ensure_partitions
from mailboat_spec import Retention, RetentionPolicy

log = logging.getLogger(__name__)

EVERY = 3600.0
"""Seconds between rounds."""
AFTER_TROUBLE = 60.0


@dataclass(slots=True)
class Upkeep:
    """What the last round found."""

    days_ahead: float | None = None
    blocked: str | None = None


class Janitor:
    """The upkeep of one outbox."""

    def __init__(self, url: UrlProvider, outbox: str, retention: Retention, pooler: str) -> None:
        self.upkeep = Upkeep()
        self._url = url
        self._outbox = outbox
        self._retention = retention
        self._pooler = pooler

    async def run(self) -> None:
        """Rounds until cancelled."""
        while True:
            try:
                await self._round()
                pause = EVERY
            except MailboatError as error:
                log.warning(
                    "Upkeep of the outbox failed; it will be tried again: %s", error, extra={"outbox": self._outbox}
                )
                pause = AFTER_TROUBLE
            await asyncio.sleep(pause)

    async def _round(self) -> None:
        link = await Link.open(self._url, "janitor", pooler=self._pooler)
        try:
            supply = await ensure_partitions(link.connection, self._outbox)
            self.upkeep.days_ahead = supply.days_ahead
            now = datetime.now(UTC)
            after, limit = limits(self._retention, now)
            report = await drop_expired(link.connection, self._outbox, after, now=now, limit=limit)
            self.upkeep.blocked = "; ".join(map(str, report.blocked)) or None
            for lost in report.lost:
                log.error("Undelivered events were dropped by the retention limit.", extra={"lost": str(lost)})
            if report.dropped:
                log.info("Old partitions dropped.", extra={"outbox": self._outbox, "partitions": list(report.dropped)})
        finally:
            await link.close()


def limits(retention: Retention, now: datetime) -> tuple[datetime, HardLimit | None]:
    """``spec.outbox.retention`` as points in time."""
    after = now - timedelta(seconds=retention.after.seconds)
    if retention.policy is RetentionPolicy.HOLD:
        return after, None
    oldest = now - timedelta(seconds=retention.max_age.seconds) if retention.max_age else None
    return after, HardLimit(oldest, retention.max_bytes.bytes if retention.max_bytes else None)
