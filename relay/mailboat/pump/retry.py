"""When to try again: back-off as values, success resets it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential, with a ceiling, and jitter so that many failures of one moment do not return in one moment."""

    initial: float
    factor: float
    ceiling: float
    jitter: float

    def delay(self, failures: int, random: Random) -> float:
        """Seconds to wait after so many failures in a row (at least one)."""
        # The exponent is bounded first: factor ** 10_000 does not fit into a float.
        steps = min(failures - 1, 64)
        plain = min(self.initial * self.factor**steps, self.ceiling)
        return plain * (1 + self.jitter * random.uniform(-1, 1))


@dataclass(frozen=True, slots=True)
class Policy:
    """How often an event is tried, and what happens to it then."""

    max_attempts: int
    backoff: Backoff
    dead_letters: bool
    """False: an event that used up its attempts blocks its key until a person decides."""

    def exhausted(self, attempts: int, retryable: bool) -> bool:
        """Whether an event that failed so often gets no further attempt."""
        return not retryable or attempts >= self.max_attempts


@dataclass(frozen=True, slots=True)
class Outage:
    """A sink that is away: how long to leave it alone. ``failures`` is 0 while it is there."""

    backoff: Backoff
    failures: int = 0

    def failed(self) -> Outage:
        return replace(self, failures=self.failures + 1)

    def recovered(self) -> Outage:
        return replace(self, failures=0)

    def delay(self, random: Random) -> float:
        return self.backoff.delay(self.failures, random) if self.failures else 0.0


OUTAGE_BACKOFF = Backoff(initial=0.25, factor=2, ceiling=5.0, jitter=0.2)
"""A sink that is away is asked again soon: it costs no event an attempt, and people wait for it to come back."""
DEAD_TOPIC_BACKOFF = Backoff(initial=1.0, factor=2, ceiling=60.0, jitter=0.2)
"""A dead-letter topic is asked seldom while it is away: to ask may take a delivery's time, and healthy keys wait."""
