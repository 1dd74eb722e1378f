"""Counters and errors of partition workers, for status and metrics: of one worker, and of all that ended."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from mailboat.delivery.histograms import DeliveryHistograms


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
    unavailable: str | None = None
    """Reason while the sink is unavailable."""

    def note_error(self, error: str, now: float) -> None:
        self.last_error, self.error_at = error, now

    def note_delivery(self, now: float) -> None:
        self.delivered_at = now

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
