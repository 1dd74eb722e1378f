"""What is to be looked at next: keys with a time, each at most once, never the same one twice at a time.

A key that is added while it is being worked on comes again afterwards, since what was seen may be old already. A key
that failed comes back later and later, with some jitter, until it succeeds once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait after the nth failure in a row."""

    initial: float = 0.5
    factor: float = 2.0
    longest: float = 60.0
    jitter: float = 0.2
    random: Callable[[], float] = random.random

    def delay(self, failures: int) -> float:
        """``failures`` counts from 0."""
        plain = min(self.initial * self.factor ** min(failures, 32), self.longest)
        return plain * (1 + self.jitter * (2 * self.random() - 1))


class WorkQueue(Generic[K]):
    """For one event loop. Not for several threads."""

    def __init__(self, backoff: Backoff | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._due: dict[K, float] = {}
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def waiting(self) -> int:
        """Keys that are due and that nobody works on yet; 0 in a quiet moment, whatever is to be looked at later."""
        now = self._clock()
        return sum(due <= now and key not in self._busy for key, due in self._due.items())

    def add(self, key: K, delay: float = 0.0) -> None:
        """Due after ``delay`` seconds, or at the time it had already, whichever comes first."""
        due = self._clock() + delay
        if key not in self._due or due < self._due[key]:
            self._due[key] = due
            self._changed.set()

    async def next(self) -> K:
        """The key that has been due for longest and that nobody works on; waits for one."""
        while True:
            free = [(due, key) for key, due in self._due.items() if key not in self._busy]
            soonest = min(free, key=lambda each: each[0], default=None)
            wait = None if soonest is None else soonest[0] - self._clock()
            if soonest is not None and wait is not None and wait <= 0:
                key = soonest[1]
                del self._due[key]
                self._busy.add(key)
                return key
            self._changed.clear()
            try:
                # Not wait_for: a cancellation that comes together with the event would be lost (Python 3.11).
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def succeeded(self, key: K, again_after: float | None = None) -> None:
        """Done; perhaps to be looked at again after a while."""
        self._failures.pop(key, None)
        self._release(key)
        if again_after is not None:
            self.add(key, again_after)

    def failed(self, key: K, retry_after: float | None = None) -> float:
        """To be tried again; returns in how many seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(self._backoff.delay(failures), retry_after or 0.0)
        self._release(key)
        # What was added meanwhile is no reason to hurry: it waits for the back-off too.
        self._due[key] = self._clock() + delay
        self._changed.set()
        return delay

    def _release(self, key: K) -> None:
        self._busy.discard(key)
        self._changed.set()
