"""Retry policy and back-off as immutable values; a success resets the back-off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with a ceiling. Jitter spreads the retries of simultaneous failures."""

    initial: float
    factor: float
    ceiling: float
    jitter: float

    def delay(self, failures: int, random: Random) -> float:
        """Return the seconds to wait after this number of consecutive failures (at least one)."""
        # Bound the exponent first: factor ** 10_000 does not fit into a float.
        steps = min(failures - 1, 64)
        plain = min(self.initial * self.factor**steps, self.ceiling)
        return plain * (1 + self.jitter * random.uniform(-1, 1))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Attempt limit, back-off, and treatment of exhausted events."""

    max_attempts: int
    backoff: Backoff
    dead_letters: bool
    """If False, an event without attempts left blocks its key until a person decides."""

    def exhausted(self, attempts: int, retryable: bool) -> bool:
        """Return whether an event with this number of attempts gets no further one."""
        return not retryable or attempts >= self.max_attempts


@dataclass(frozen=True, slots=True)
class Outage:
    """Back-off while a sink is unavailable. ``failures`` is 0 while the sink is available."""

    backoff: Backoff
    failures: int = 0

    def failed(self) -> Outage:
        return replace(self, failures=self.failures + 1)

    def recovered(self) -> Outage:
        return replace(self, failures=0)

    def delay(self, random: Random) -> float:
        return self.backoff.delay(self.failures, random) if self.failures else 0.0


OUTAGE_BACKOFF = Backoff(initial=0.25, factor=2, ceiling=5.0, jitter=0.2)
"""Short, because a retry of an unavailable sink costs no event an attempt and recovery should be noticed soon."""
DEAD_TOPIC_BACKOFF = Backoff(initial=1.0, factor=2, ceiling=60.0, jitter=0.2)
"""Long, because a try on an unavailable dead-letter topic may take the delivery timeout while healthy keys wait."""
