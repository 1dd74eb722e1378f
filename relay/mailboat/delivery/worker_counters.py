"""Counters and errors of a partition worker, for status and metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
