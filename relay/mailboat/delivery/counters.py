"""Figures of delivery for status and metrics: histograms and rate of a subscription, counters and errors of workers.

Histograms and rates are counted per batch, not per event: a relay moves a hundred thousand events per second.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

_RATE_OVER = 10
"""Seconds over which a rate is measured."""


class DeliveryRate:
    """Events per second over the last whole seconds.

    Counted when events are delivered, not sampled by a timer: an idle relay must not wake up for its rates.
    """

    def __init__(self) -> None:
        self._began: int | None = None
        """Second of the first event."""
        self._seconds: dict[int, int] = {}
        """Number of events by second, of the recent seconds with events."""

    def add(self, now: float, events: int) -> None:
        second = int(now)
        if self._began is None:
            self._began = second
        if second not in self._seconds:
            self._seconds = {past: count for past, count in self._seconds.items() if past >= second - _RATE_OVER}
        self._seconds[second] = self._seconds.get(second, 0) + events

    def at(self, now: float) -> float:
        """Return the rate, which leaves out the current second."""
        end = int(now)
        if self._began is None or self._began == end:
            return 0.0
        events = sum(events for second, events in self._seconds.items() if end - _RATE_OVER <= second < end)
        return events / min(_RATE_OVER, end - self._began)


class Histogram:
    """Counts of observed values by upper bound, in the manner of Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Per bucket, not cumulative; the last one has no bound."""
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class DeliveryHistograms:
    """Histograms and rate of one subscription, as long as the relay lives."""

    latency: Histogram = field(
        default_factory=lambda: Histogram((0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600))
    )
    """Seconds from the insert of the oldest event of a delivered batch to its acknowledgement."""
    batch: Histogram = field(default_factory=lambda: Histogram((1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)))
    """Messages per batch that was passed to the sink."""
    attempts: Histogram = field(default_factory=lambda: Histogram((1, 2, 3, 5, 10, 25)))
    rate: DeliveryRate = field(default_factory=DeliveryRate)

    def delivered(self, oldest: str, attempts: int, events: int) -> None:
        """Count delivered events; ``oldest`` is the ``created_at`` of the first of them."""
        self.attempts.observe(attempts, events)
        try:
            age = (datetime.now(UTC) - datetime.fromisoformat(oldest)).total_seconds()
        except (ValueError, TypeError):  # a time outside RFC 3339, in a table that Mailboat did not create
            return
        self.latency.observe(max(0.0, age))  # the clocks of database and relay may differ


@dataclass(slots=True)
class WorkerCounters:
    """Counters and errors since the worker started."""

    delivered: int = 0
    refused: int = 0
    last_error: str | None = None
    error_at: float = 0.0
    """Time of the last error, by the stream's clock."""
    delivered_at: float = -math.inf
    """Last successful delivery, also of a parked event."""

    def note_error(self, error: str, now: float) -> None:
        self.last_error, self.error_at = error, now

    def current_error(self, parked: int) -> str | None:
        """Return the last error until a delivery succeeds, and in any case while events are parked."""
        return self.last_error if parked or self.delivered_at <= self.error_at else None


@dataclass(slots=True)
class Totals:
    """Counts of ended workers per subscription. They outlive a session, so that totals never decrease."""

    delivered: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    refused: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    last_error: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Error of an ended worker and its time by the relay's clock; shown until a delivery succeeds."""
    meters: dict[str, DeliveryHistograms] = field(default_factory=lambda: defaultdict(DeliveryHistograms))

    def add(self, name: str, counters: WorkerCounters) -> None:
        """Add the counts of an ended worker. Its error replaces an older one, and its success clears one."""
        self.delivered[name] += counters.delivered
        self.refused[name] += counters.refused
        _, at = self.last_error.get(name, ("", -math.inf))
        if (error := counters.current_error(0)) is not None and counters.error_at >= at:
            self.last_error[name] = error, counters.error_at
        elif counters.delivered_at > at:
            self.last_error.pop(name, None)
