"""Counts of a relay process that outlive its sessions."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from mailboat.delivery.histograms import DeliveryHistograms
from mailboat.delivery.worker_counters import WorkerCounters


@dataclass(slots=True)
class Totals:
    """Counts of ended workers per subscription, so that totals never decrease."""

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
