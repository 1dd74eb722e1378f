"""Evaluation of a sink's results, which decides about order and attempts.

A run is the ordered list of events that were published and not yet settled. After every round each item is delivered,
refused, set aside behind a refused event of its key, or pending. Only this module defines these rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable
from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import Series


class Outcome(Enum):
    PENDING = "pending"
    DELIVERED = "delivered"
    REFUSED = "refused"
    ASIDE = "aside"
    """Waits behind a refused event of its key, or the key was already parked."""


@dataclass(slots=True)
class Attempt:
    """One event of a run with a failure."""

    event: OutboxEvent
    sequence: int
    outcome: Outcome = Outcome.PENDING
    refusal: EventRefused | None = None
    attempts: int = 0
    """Attempts counted before the current one."""
    replay: bool = False
    ordinal: int | None = None
    """Row of the parked event, if the item was parked."""
    series: Series | None = None
    """Series of the sequence number. None means the current series of the partition, since the event is new."""
    first_failed_at: str | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Instruction for the items that are still pending."""

    unavailable: SinkUnavailable | None
    """Set if the sink is unavailable: wait, then send all pending items again."""
    one_by_one: bool
    """Some item was refused and the sink can't identify it: send single items, which get a definite result."""


def evaluate(items: Sequence[Attempt], failures: Mapping[int, DeliveryError]) -> RoundResult:
    """Set the outcome of every item of one batch from the sink's results."""
    unavailable: SinkUnavailable | None = None
    refused = False
    for index, item in enumerate(items):
        match failures.get(index):
            case None:
                item.outcome = Outcome.DELIVERED
            case EventRefused() as refusal:
                item.outcome, item.refusal = Outcome.REFUSED, refusal
                refused = True
            case SinkUnavailable() as reason:
                unavailable = unavailable or reason
            case unclear if len(items) == 1:
                # A sink must return a definite result for a batch of one. If it does not, back off: no tight loop.
                unavailable = SinkUnavailable(f"the sink gave no definite answer: {unclear}")
    undecided = any(item.outcome is Outcome.PENDING for item in items)
    return RoundResult(unavailable, one_by_one=undecided and unavailable is None and not refused)


def set_aside(items: Iterable[Attempt], parked: Collection[str], *, ordered: bool = True) -> None:
    """Set aside the items behind a refused event of their key. Idempotent."""
    if not ordered:
        return
    failed: set[str] = set()
    for item in items:
        key = item.event.key
        if key is None:
            continue
        if item.outcome is Outcome.REFUSED:
            if key in failed:
                item.outcome, item.refusal = Outcome.ASIDE, None  # only the first refusal of a key is certain
            failed.add(key)
        elif item.outcome is Outcome.PENDING and (key in failed or key in parked):
            item.outcome = Outcome.ASIDE


def settled_prefix(items: Sequence[Attempt]) -> int:
    """Return the number of leading items that have an outcome. Progress may be committed up to there."""
    return next((index for index, item in enumerate(items) if item.outcome is Outcome.PENDING), len(items))
