"""What the relays stamped on the messages: places in their partitions' sequences, and attempts. Pure, like the proof.

A place is given once and for all: a copy comes under the number of its original, no number is given twice, and none is
left out. A relay that went on with a partition after it had lost it would break that (G5), and so would false copies
(G9).

Copies have an order, too (G9): what followed an event follows its copy again. A relay that takes over sends all that is
not settled of a key, one after the other; so a copy comes right after the event before it, or goes back. One that leaps
ahead has left something out. Two relays whose messages mix never look like that, however late those of the first one
are: whichever sends a copy, the other one has been there. Three may, if messages of the first come when the second has
died as well: after many crashes the count is for people to read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mailboat_demo.verification import Arrival


class Stamped(NamedTuple):
    """A message with what the relay that sent it wrote on it."""

    arrival: Arrival
    generation: int
    partition: int
    sequence: int
    attempt: int
    body: bytes

    @property
    def copied(self) -> tuple[int, int, int, bytes]:
        """What a copy has in common with its original."""
        return self.generation, self.partition, self.sequence, self.body


@dataclass(frozen=True, slots=True)
class Numbering:
    """Counts that must be 0, and attempts."""

    changed_copies: int
    """Duplicates with another number or content than the original."""
    numbers_twice: int
    """Numbers that more than one event got."""
    copies_out_of_order: int
    """Duplicates before which an event of their key was left out. Must be 0 after one crash; see above."""
    numbers_left_out: int
    """A dead letter leaves one, until it is replayed."""
    attempts: int
    """The highest that was stamped."""


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
    """Places of events in their keys, by first arrival: one that is dead was never there, and nobody waits for it."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, int]] = defaultdict(dict)
        self._last: dict[str, int] = {}

    def leaps(self, arrival: Arrival) -> bool:
        """Whether this is a copy that comes before its turn."""
        if arrival.replay:  # late by request
            return False
        places = self._places[arrival.key]
        is_copy = arrival.event_id in places
        place = places.setdefault(arrival.event_id, len(places))
        leaps = is_copy and place > self._last[arrival.key] + 1
        self._last[arrival.key] = place
        return leaps
