"""Events per second over the last seconds, from running counts."""

from __future__ import annotations

from collections import defaultdict, deque

_OVER = 10.0
"""Seconds over which rates are measured."""


class Rates:
    """Rates of several counts by name."""

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
