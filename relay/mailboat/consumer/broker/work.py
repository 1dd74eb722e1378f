"""An event on its way through the engine, and the protocol between its life cycle and the tasks that move it."""

from datetime import datetime
from enum import Enum
from typing import Any, Final, Protocol

from mailboat.consumer.broker.interfaces import Record
from mailboat.consumer.handler_outcomes import Refusal

Key = tuple[int, str]
"""Partition and key of a lane."""

REVOKED: Final = "revoked"
"""``Work.interrupted`` if the partition was revoked."""
FOREVER: Final = float("inf")


class Work:
    """One record on its way through the engine."""

    # Defaults are attributes of the class, because one object is made per event and most keep the defaults.
    id = ""
    """Event id as the claim store knows it; empty until the event is claimed."""
    attempt = 0
    redeliveries = 0
    claimed = False
    """True while the claim store holds a claim of this process."""
    detached = False
    """The partition was revoked or lost: the event is not settled at the source."""
    interrupted: str | None = None
    """Why the engine cancelled the handler."""
    due = 0.0
    cause: str | None = None
    """Why the lane is parked."""
    first_failed: datetime | None = None

    def __init__(self, record: Record, lane: Key | None) -> None:
        self.record = record
        self.lane = lane

    def log_fields(self, consumer: str) -> dict[str, Any]:
        """Return the fields of a log record about the event."""
        event = self.record.event
        return {
            "consumer": consumer,
            "event": str(event.id),
            "type": event.type,
            "attempt": self.attempt,
            "partition": self.record.partition,
            "offset": self.record.original.offset,
        }


class Mark(Enum):
    """Result of an event in the claim store."""

    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    RELEASED = "released"


# Bound once: in Python 3.11, access to a member of an enum is a call.
DONE: Final = Mark.DONE
FAILED: Final = Mark.FAILED
DEAD: Final = Mark.DEAD
RELEASED: Final = Mark.RELEASED


class Lifecycle(Protocol):
    """Life cycle of events, as called by workers, marks and the dead-letter queue, in the event loop."""

    def next_work(self) -> Work | None:
        """Return an event to handle; None if no event is ready, or if the engine is stopping."""

    def refusal_before(self, work: Work) -> Refusal | None:
        """Return why the event is not handled at all; None if it is."""

    def finished(self, work: Work, refusal: Refusal | None, cause: BaseException | None, *, duplicate: bool) -> None:
        """``refusal`` is None if the handlers succeeded. ``known``: the inbox has the event, no handler ran."""

    def marked(self, work: Work, mark: Mark, retry_in: float, *, held: bool) -> None:
        """The result is in the claim store. ``ours`` is False if the claim was lost before. ``retry_in``: seconds
        until the next attempt, after FAILED."""

    def dead_lettered(self, work: Work) -> None:
        """The dead letter is acknowledged."""
