"""Which of the waiting events make the next batch: as many as fit, in order, without those whose key is parked.

Almost always that is simply the next so many of them, found without looking at each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from mailboat.events import Event, event_bytes

_payload, _headers, _tags = (itemgetter(Event._fields.index(name)) for name in ("payload", "headers", "tags"))


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a batch may be."""

    messages: int
    bytes: int
    """Of whole events. A single event may have more."""
    one_per_key: bool
    """At most one event of a key."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A batch, as indexes of the waiting events."""

    sent: Sequence[int]
    aside: Sequence[int]
    """Of parked keys, up to ``end``: they wait behind what their key waits for."""
    end: int
    """Up to which (excluded) all are in the batch or aside."""


def total_bytes(events: Sequence[Event]) -> int:
    """How much some events come to, as ``event_bytes`` counts; without a call for each."""
    return (
        sum(map(len, filter(None, map(_payload, events))))
        + sum(map(len, filter(None, map(_headers, events))))
        + sum(map(len, map(_tags, events)))
    )


def choose(events: Sequence[Event], start: int, limits: Limits, parked: Collection[str], bytes: int) -> Chosen:
    """The next batch, from ``start`` on. It is never empty unless all that is left is aside.

    ``bytes``: what all of the events come to. Mostly they fit into one batch, and need not be measured again.
    """
    if not parked and not limits.one_per_key:
        end = min(start + limits.messages, len(events))
        if bytes <= limits.bytes or total_bytes(events[start:end]) <= limits.bytes:
            return Chosen(range(start, end), (), end)
    return _choose_one_by_one(events, start, limits, parked)


def _choose_one_by_one(events: Sequence[Event], start: int, limits: Limits, parked: Collection[str]) -> Chosen:
    sent: list[int] = []
    aside: list[int] = []
    keys: set[str] = set()
    size, end = 0, start
    for end in range(start, len(events)):
        event = events[end]
        key, weight = event.key, event_bytes(event)
        if key is not None and key in parked:
            aside.append(end)
            continue
        if len(sent) == limits.messages or (sent and size + weight > limits.bytes):
            break
        if limits.one_per_key and key is not None:
            if key in keys:
                break
            keys.add(key)
        sent.append(end)
        size += weight
    else:
        end = len(events)
    return Chosen(sent, aside, end)
