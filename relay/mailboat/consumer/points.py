"""Named points in the work of a consumer. Unused in production; tests kill the process at each point."""

from collections.abc import Callable
from enum import Enum


class ConsumerPoint(Enum):
    """Point in the cycle of a worker that pulls from an outbox."""

    PULLED = "pulled"
    HANDLED = "handled"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    REFUSED = "refused"


class BrokerPoint(Enum):
    """Point in the life of a record from a broker."""

    RECEIVED = "received"
    CLAIMED = "claimed"
    HANDLED = "handled"
    """The handlers returned or failed; nothing is marked yet."""
    MARKED_DONE = "marked-done"
    DEAD_LETTER_WRITTEN = "dead-letter-written"
    MARKED_DEAD = "marked-dead"
    COMMITTED = "committed"
    """The source committed or acknowledged settled records. Passed by the source."""


Passing = Callable[[ConsumerPoint], None]
PassingPoint = Callable[[BrokerPoint], None]


def ignore_point(point: ConsumerPoint | BrokerPoint) -> None:
    """Ignore the point (default outside tests)."""
