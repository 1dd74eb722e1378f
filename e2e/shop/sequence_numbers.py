"""Audit of the sequence numbers and attempts in the messages' headers. Pure.

A sequence number is final: a copy has the number of its original, no number belongs to two events, and none is left
out. A relay that continues with a partition after it lost the lease breaks this (G5), and so do changed copies (G9).

Copies of a key keep the order of the originals (G9). A relay that takes over a partition sends the unsettled events of
a key in order. So a copy follows its predecessor, or goes back to an earlier event. A copy that skips an event is out
of order. The interleaved messages of two relays never skip one: the other relay has already sent the skipped event.
The messages of three relays can, if those of the first arrive after the crash of the second. So after several crashes
the count is printed and not asserted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mailboat_demo.verification import Arrival


class Stamped(NamedTuple):
    """A message with the headers of the relay that sent it."""

    arrival: Arrival
    generation: int
    partition: int
    sequence: int
    attempt: int
    body: bytes

    @property
    def copied(self) -> tuple[int, int, int, bytes]:
        """The fields that a copy shares with its original."""
        return self.generation, self.partition, self.sequence, self.body


@dataclass(frozen=True, slots=True)
class Numbering:
    """Counts that must be 0, and the highest attempt."""

    changed_copies: int
    """Copies with another number or content than the original."""
    numbers_twice: int
    """Numbers of more than one event."""
    copies_out_of_order: int
    """Copies that skip an event of their key. Must be 0 after one crash; see above."""
    numbers_left_out: int
    """Numbers of no event. A dead letter leaves one out until its replay."""
    attempts: int
    """The highest attempt."""


def numbering(messages: Iterable[Stamped]) -> Numbering:
    originals: dict[str, Stamped] = {}
    copies = _Copies()
    changed = leaps = attempts = 0
    for message in messages:
        original = originals.setdefault(message.arrival.event_id, message)
        changed += message.copied != original.copied
        leaps += copies.leaps(message.arrival)
        attempts = max(attempts, message.attempt)
    given: dict[tuple[int, int], list[int]] = defaultdict(list)
    for original in originals.values():
        given[original.generation, original.partition].append(original.sequence)
    return Numbering(
        changed_copies=changed,
        copies_out_of_order=leaps,
        numbers_twice=sum(times > 1 for numbers in given.values() for times in Counter(numbers).values()),
        numbers_left_out=sum(len(set(range(1, max(numbers) + 1)) - set(numbers)) for numbers in given.values()),
        attempts=attempts,
    )


class _Copies:
    """Positions of events within their keys, by first arrival. A dead letter has none."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, int]] = defaultdict(dict)
        self._last: dict[str, int] = {}

    def leaps(self, arrival: Arrival) -> bool:
        """Whether this is a copy that skips an event of its key."""
        if arrival.replay:  # a replay is out of order by design
            return False
        places = self._places[arrival.key]
        is_copy = arrival.event_id in places
        place = places.setdefault(arrival.event_id, len(places))
        leaps = is_copy and place > self._last[arrival.key] + 1
        self._last[arrival.key] = place
        return leaps
