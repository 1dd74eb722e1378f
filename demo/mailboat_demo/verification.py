"""Comparison of the committed changes with the messages of the consumer. Pure, so that it can be tested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Written(NamedTuple):
    """A committed change of an order, from the application's own table."""

    key: str
    version: int
    """1, 2, 3, ... per key: the application locks the order's row while it increments."""


class Arrival(NamedTuple):
    """A message at the consumer."""

    event_id: str
    key: str
    version: int
    replay: bool
    """True for a replayed dead letter, which arrives late and is marked as a replay."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Counts of the comparison."""

    written: int
    received: int
    """Distinct events."""
    duplicates: int
    lost: int
    out_of_order: int
    uncommitted: int
    """Events that arrived but were never committed: rolled back, or not from the application."""

    @property
    def holds(self) -> bool:
        """True if the proof holds. Duplicates are allowed: one relay was killed with messages in flight."""
        return self.written == self.received and not (self.lost or self.out_of_order or self.uncommitted)

    def __str__(self) -> str:
        return (
            f"{self.written} written, {self.received} received, {self.lost} lost, {self.out_of_order} out of order,"
            f" {self.uncommitted} uncommitted; duplicates: {self.duplicates}"
        )


def verify_delivery(written: Mapping[str, Written], arrivals: Iterable[Arrival]) -> Verification:
    """Compare by event id. Order is checked among first arrivals of a key, without replays."""
    seen: set[str] = set()
    newest: dict[str, int] = {}
    duplicates = out_of_order = 0
    for arrival in arrivals:
        if arrival.event_id in seen:
            duplicates += 1
            continue
        seen.add(arrival.event_id)
        if arrival.replay:
            continue
        if arrival.version <= newest.get(arrival.key, 0):
            out_of_order += 1
        newest[arrival.key] = max(arrival.version, newest.get(arrival.key, 0))
    return Verification(
        written=len(written),
        received=len(seen & written.keys()),
        duplicates=duplicates,
        lost=len(written.keys() - seen),
        out_of_order=out_of_order,
        uncommitted=len(seen - written.keys()),
    )
