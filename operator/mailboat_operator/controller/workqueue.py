"""Work queue of keys with due times. Each key is queued at most once and never processed twice at the same time.

The states of a key are in the docstring of ``controller``.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from mailboat_operator.kube.client import Key


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay after the nth failure in a row."""

    initial: float = 0.5
    factor: float = 2.0
    longest: float = 60.0
    jitter: float = 0.2

    def delay(self, failures: int) -> float:
        """``failures`` counts from 0."""
        plain = min(self.initial * self.factor ** min(failures, 32), self.longest)
        return plain * (1 + self.jitter * random.uniform(-1, 1))


class WorkQueue:
    """Work queue for one event loop. Not thread-safe."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def waiting(self) -> int:
        """Return the number of due keys that are not being processed. Keys due later do not count."""
        now = self._clock()
        return sum(due <= now and key not in self._busy for key, due in self._due.items())

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Queue a key, due after ``delay`` seconds or at its existing due time, whichever is earlier."""
        due = self._clock() + delay
        if key not in self._due or due < self._due[key]:
            self._due[key] = due
            self._changed.set()

    async def next(self) -> Key:
        """Wait for a due key that is not being processed, and return the one due longest."""
        while True:
            free = {key: due for key, due in self._due.items() if key not in self._busy}
            soonest = min(free, key=free.__getitem__, default=None)
            wait = None if soonest is None else free[soonest] - self._clock()
            if soonest is not None and wait is not None and wait <= 0:
                del self._due[soonest]
                self._busy.add(soonest)
                return soonest
            self._changed.clear()
            try:
                # Not wait_for: a cancellation that coincides with the event would be lost (Python 3.11).
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def succeeded(self, key: Key, requeue_after: float | None = None) -> None:
        self._failures.pop(key, None)
        self._release(key)
        if requeue_after is not None:
            self.add(key, requeue_after)

    def failed(self, key: Key, retry_after: float | None = None) -> float:
        """Requeue a failed key and return the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(self._backoff.delay(failures), retry_after or 0.0)
        self._due[key] = self._clock() + delay  # an add during processing does not shorten the back-off
        self._release(key)
        return delay

    def _release(self, key: Key) -> None:
        self._busy.discard(key)
        self._changed.set()
