"""How many events a second: from a running count, over the last seconds."""

from __future__ import annotations

from collections import defaultdict, deque

_OVER = 10.0
"""Seconds over which rates are measured."""


class Rates:
    """The rate of each of several counts, by name."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def note(self, name: str, now: float, count: int) -> None:
        """How far a count has come by now. To be told about once a second."""
        samples = self._samples[name]
        samples.append((now, count))
        while samples[0][0] < now - _OVER:
            samples.popleft()

    def forget_all_but(self, names: set[str]) -> None:
        """Nobody asks for the others any more."""
        for name in self._samples.keys() - names:
            del self._samples[name]

    def __getitem__(self, name: str) -> float:
        samples = self._samples.get(name)
        if not samples or samples[-1][0] == samples[0][0]:
            return 0.0
        (began, first), (ended, last) = samples[0], samples[-1]
        return (last - first) / (ended - began)
