"""What a sink's answers mean for the events of a run: the decision at the heart of order and attempts.

A run is what was handed over and not yet settled, in order. After every round of answers each of its items is
delivered, refused, set aside behind a refused one of its key, or still to be sent; the rules are here and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable
from mailboat.events import Event
from mailboat.outbox.store import Series


class Fate(Enum):
    """What is known about an item."""

    PENDING = "pending"
    DELIVERED = "delivered"
    REFUSED = "refused"
    ASIDE = "aside"
    """It waits behind a refused event of its key, or its key was parked before."""


@dataclass(slots=True)
class Item:
    """One event of a run that did not go smoothly."""

    event: Event
    sequence: int
    fate: Fate = Fate.PENDING
    refusal: EventRefused | None = None
    attempts: int = 0
    """Attempts that were counted before this one."""
    replay: bool = False
    ordinal: int | None = None
    """Its row in the parking lot, if it comes from there."""
    series: Series | None = None
    """What its sequence is a number of; None: it was just taken, so that of its partition."""
    first_failed_at: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """How to go on with what is still pending."""

    away: SinkUnavailable | None
    """The sink is away: wait, then send all of it again."""
    one_by_one: bool
    """Somebody among them was refused and the sink can't say who: a batch of one gives a definite answer."""


def judge(items: Sequence[Item], failures: Mapping[int, DeliveryError]) -> Round:
    """Gives every item of one answered batch its fate."""
    away: SinkUnavailable | None = None
    refused = False
    for index, item in enumerate(items):
        match failures.get(index):
            case None:
                item.fate = Fate.DELIVERED
            case EventRefused() as refusal:
                item.fate, item.refusal = Fate.REFUSED, refusal
                refused = True
            case SinkUnavailable() as reason:
                away = away or reason
            case unclear if len(items) == 1:
                # A sink must be definite about a batch of one. One that is not may not be asked in a tight loop.
                away = SinkUnavailable(f"the sink gave no definite answer: {unclear}")
    undecided = any(item.fate is Fate.PENDING for item in items)
    return Round(away, one_by_one=undecided and away is None and not refused)


def set_aside(items: Iterable[Item], parked: Collection[str], *, ordered: bool = True) -> None:
    """Puts what stands behind a refused event of its key aside. Asking again changes nothing."""
    if not ordered:
        return
    failed: set[str] = set()
    for item in items:
        key = item.event.key
        if key is None:
            continue
        if item.fate is Fate.REFUSED:
            if key in failed:
                item.fate, item.refusal = Fate.ASIDE, None  # only the first of a key was to blame for sure
            failed.add(key)
        elif item.fate is Fate.PENDING and (key in failed or key in parked):
            item.fate = Fate.ASIDE


def settled_prefix(items: Sequence[Item]) -> int:
    """How many items at the beginning have a fate: progress may be written down up to there."""
    for index, item in enumerate(items):
        if item.fate is Fate.PENDING:
            return index
    return len(items)
