"""Back-off as an immutable value. Callers count consecutive failures; a success resets the count."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with a ceiling. Jitter spreads the retries of simultaneous failures."""

    initial: float
    factor: float
    ceiling: float
    jitter: float

    def delay(self, failures: int, random: Random) -> float:
        """Return the seconds to wait after this number of consecutive failures; 0 after none."""
        if failures == 0:
            return 0.0
        # Bound the exponent first: factor ** 10_000 does not fit into a float.
        steps = min(failures - 1, 64)
        plain = min(self.initial * self.factor**steps, self.ceiling)
        return plain * (1 + self.jitter * random.uniform(-1, 1))


OUTAGE_BACKOFF = Backoff(initial=0.25, factor=2, ceiling=5.0, jitter=0.2)
"""Short, because a retry of an unavailable sink costs no event an attempt and recovery should be noticed soon."""
DEAD_TOPIC_BACKOFF = Backoff(initial=1.0, factor=2, ceiling=60.0, jitter=0.2)
"""Long, because a try on an unavailable dead-letter topic may take the delivery timeout while healthy keys wait."""
