"""Availability of a subscription's sink, and the log lines of an outage: its begin, rarely that it lasts, and its end.

An outage begins with the first partition that can't deliver and ends when every partition of this relay can again. So
a cluster of which one broker is away does not fill the log with changes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

STILL_EVERY = 600.0
"""Seconds between two lines of an outage that lasts."""


@dataclass(slots=True)
class SinkHealth:
    """Outage of one sink as the partitions of this relay see it. Times are of the stream's clock."""

    subscription: str
    _unavailable: set[int] = field(default_factory=set)
    """Partitions that can't deliver. -1 stands for the sink that is not open yet."""
    _since: float = 0.0
    _logged_at: float = 0.0

    def unavailable(self, reason: str, now: float, partition: int = -1) -> None:
        """Note that a partition can't deliver."""
        if not self._unavailable:
            self._since = self._logged_at = now
            log.warning("Sink unavailable: %s", reason, extra={"subscription": self.subscription})
        elif now - self._logged_at >= STILL_EVERY:
            self._logged_at = now
            about = {"subscription": self.subscription, "seconds": round(now - self._since)}
            log.warning("Sink still unavailable: %s", reason, extra=about)
        self._unavailable.add(partition)

    def reachable(self, now: float, partition: int = -1) -> None:
        """Note that a partition delivers, or that the sink is open."""
        if not self._unavailable:
            return
        self._unavailable.discard(partition)
        if not self._unavailable:
            about = {"subscription": self.subscription, "seconds": round(now - self._since, 1)}
            log.info("Sink reachable again", extra=about)

    def released(self, partition: int) -> None:
        """Forget a partition that this relay does not own any more. Whether its outage has ended is unknown here."""
        self._unavailable.discard(partition)
