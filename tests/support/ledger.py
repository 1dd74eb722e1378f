"""Written and arrived events, and the check that compares them: guarantees G1, G2, G3 and G9.

The payload of a test event has its key and its number within the key. Writers take the number under the key's lock, so
that the committed events of a key have the numbers 1, 2, 3, … in the order of their commits.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import psycopg


class Written(NamedTuple):
    """An event, as written."""

    event_id: str
    key: str | None
    number: int
    payload: bytes


class Arrival(NamedTuple):
    """A message, as received by a consumer."""

    event_id: str
    key: str | None
    payload: bytes | None
    sequence: int
    partition: int
    generation: int
    attempt: int
    at: float
    """Monotonic seconds."""


def sequence_of(headers: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return sequence, partition, generation and attempt of a message."""
    generation, partition, sequence = map(int, headers["mailboat-sequence"].split("."))
    return sequence, partition, generation, int(headers.get("mailboat-attempt", 1))


class Ledger:
    """Events by the outcome of their transactions. Thread-safe."""

    def __init__(self) -> None:
        self.committed: dict[str, Written] = {}
        self.rolled_back: set[str] = set()
        self._lock = threading.Lock()

    def commit(self, events: Iterable[Written]) -> None:
        with self._lock:
            self.committed.update((event.event_id, event) for event in events)

    def roll_back(self, events: Iterable[Written]) -> None:
        with self._lock:
            self.rolled_back.update(event.event_id for event in events)


def payload(key: str | None, number: int, **more: object) -> bytes:
    return json.dumps({"key": key, "number": number, **more}).encode()


def in_the_table(url: str, table: str = "mailboat.outbox") -> dict[str, Written]:
    """Return the events in the outbox, for tests in which a commit may be lost after it returned."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(f"select event_id::text, key, payload from {table}").fetchall()
    return {
        event_id: Written(event_id, key, json.loads(content)["number"], bytes(content))
        for event_id, key, content in rows
    }


@dataclass(frozen=True, slots=True)
class Delivered:
    """Result of a check, for the test's output."""

    committed: int
    arrivals: int
    duplicates: int
    kills: int

    def __str__(self) -> str:
        return (
            f"{self.committed} committed, {self.arrivals} arrived, {self.duplicates} of them again,"
            f" {self.kills} kills: 0 lost, 0 uncommitted, 0 out of order"
        )


def check_delivery(
    committed: Mapping[str, Written],
    rolled_back: Iterable[str],
    arrivals: Sequence[Arrival],
    *,
    kills: int = 0,
    ambiguous: bool = False,
    gapless: bool = True,
) -> Delivered:
    """Check that exactly the committed events arrived, and that the first arrivals of a key are in commit order.

    Duplicates are allowed only after ``kills`` or if answers of the sink were ``ambiguous``, and must have the payload
    and the sequence number of the original. ``gapless``: the sequence numbers of each partition are 1 to n, one per
    event.
    """
    first: dict[str, Arrival] = {}
    for arrival in arrivals:
        first.setdefault(arrival.event_id, arrival)

    undone = first.keys() & set(rolled_back)
    assert not undone, f"G3: {len(undone)} events of rolled-back transactions were published: {_some(undone)}"
    unknown = first.keys() - committed.keys()
    assert not unknown, f"G3: {len(unknown)} events were published that were never committed: {_some(unknown)}"
    lost = committed.keys() - first.keys()
    assert not lost, (
        f"G1: {len(lost)} of {len(committed)} committed events did not arrive: {_some(committed[i] for i in lost)}"
    )
    for event_id, event in committed.items():
        assert first[event_id].payload == event.payload, f"{event_id} arrived with another payload"
        assert first[event_id].key == event.key, f"{event_id} arrived with another key"
    _check_order(committed, first.values())
    duplicates = _check_duplicates(first, arrivals, allowed=ambiguous or kills > 0)
    if gapless:
        _check_sequences(first.values())
    return Delivered(len(committed), len(arrivals), duplicates, kills)


def _check_order(committed: Mapping[str, Written], first: Iterable[Arrival]) -> None:
    seen: dict[str, list[Written]] = defaultdict(list)
    for arrival in first:  # in order of arrival
        event = committed[arrival.event_id]
        if event.key is not None:
            seen[event.key].append(event)
    for key, events in seen.items():
        for before, after in pairwise(events):
            assert before.number < after.number, (
                f"G2: key {key} is out of order: {before} arrived before {after};"
                f" the first arrivals are {[event.number for event in events]}"
            )


def _check_duplicates(first: Mapping[str, Arrival], arrivals: Sequence[Arrival], *, allowed: bool) -> int:
    duplicates = 0
    for arrival in arrivals:
        original = first[arrival.event_id]
        if arrival is original:
            continue
        duplicates += 1
        place = (arrival.partition, arrival.generation, arrival.sequence)
        original_place = (original.partition, original.generation, original.sequence)
        assert place == original_place, f"G9: a duplicate came under another number: {arrival} after {original}"
        assert arrival.payload == original.payload, f"G9: a duplicate came with another payload: {arrival}"
    assert allowed or not duplicates, f"G9: {duplicates} duplicates, and nothing was killed: {_some(_again(arrivals))}"
    return duplicates


def _check_sequences(first: Iterable[Arrival]) -> None:
    numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for arrival in first:
        numbers[arrival.generation, arrival.partition].append(arrival.sequence)
    for (generation, partition), given in numbers.items():
        twice = [number for number, times in Counter(given).items() if times > 1]
        assert not twice, f"partition {partition} of generation {generation} gave numbers twice: {_some(twice)}"
        gaps = set(range(1, len(given) + 1)) - set(given)
        assert not gaps, f"partition {partition} of generation {generation} left numbers out: {_some(gaps)}"


def _again(arrivals: Iterable[Arrival]) -> list[Arrival]:
    counts = Counter(arrival.event_id for arrival in arrivals)
    return [arrival for arrival in arrivals if counts[arrival.event_id] > 1]


def _some(things: Iterable[object], limit: int = 5) -> str:
    listed = list(things)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(str(thing) for thing in listed[:limit]) + more
