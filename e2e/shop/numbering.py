"""What the relays stamped on the messages: places in their partitions' sequences, and attempts. Pure, like the proof.

A place is given once and for all: a copy comes under the number of its original, no number is given twice, and none is
left out. A relay that went on with a partition after it had lost it would break that (G5), and so would false copies
(G9).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mailboat.demo.proof import Arrival


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
    numbers_left_out: int
    """A dead letter leaves one, until it is replayed."""
    attempts: int
    """The highest that was stamped."""


def numbering(messages: Iterable[Stamped]) -> Numbering:
    originals: dict[str, Stamped] = {}
    changed = attempts = 0
    for message in messages:
        original = originals.setdefault(message.arrival.event_id, message)
        changed += message.copied != original.copied
        attempts = max(attempts, message.attempt)
    given: dict[tuple[int, int], list[int]] = defaultdict(list)
    for original in originals.values():
        given[original.generation, original.partition].append(original.sequence)
    return Numbering(
        changed_copies=changed,
        numbers_twice=sum(times > 1 for numbers in given.values() for times in Counter(numbers).values()),
        numbers_left_out=sum(len(set(range(1, max(numbers) + 1)) - set(numbers)) for numbers in given.values()),
        attempts=attempts,
    )
