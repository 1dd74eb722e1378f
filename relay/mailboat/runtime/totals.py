"""Counts of a relay process that outlive its sessions, and their rates."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from mailboat.delivery.histograms import DeliveryHistograms
from mailboat.delivery.worker_counters import WorkerCounters

_OVER = 10.0
"""Seconds over which rates are measured."""


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


class Rates:
    """Events per second over the last seconds, by the name of a count."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def note(self, name: str, now: float, count: int) -> None:
        """Record a sample of a count. Call about once per second."""
        samples = self._samples[name]
        samples.append((now, count))
        while samples[0][0] < now - _OVER:
            samples.popleft()

    def forget_all_but(self, names: set[str]) -> None:
        """Remove the samples of all other names."""
        for name in self._samples.keys() - names:
            del self._samples[name]

    def __getitem__(self, name: str) -> float:
        samples = self._samples.get(name)
        if not samples or samples[-1][0] == samples[0][0]:
            return 0.0
        (began, first), (ended, last) = samples[0], samples[-1]
        return (last - first) / (ended - began)
