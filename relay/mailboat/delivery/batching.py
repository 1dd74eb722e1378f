"""Selection of the next batch: as many queued events as fit, in order, without events of parked keys."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from mailboat.model import OutboxEvent, event_bytes

_payload, _headers, _tags = (itemgetter(OutboxEvent._fields.index(name)) for name in ("payload", "headers", "tags"))


@dataclass(frozen=True, slots=True)
class Limits:
    messages: int
    bytes: int
    """Total size of the events. A single event may be larger."""
    one_per_key: bool


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A batch as indexes of the queued events."""

    sent: Sequence[int]
    aside: Sequence[int]
    """Events of parked keys before ``end``: they are parked behind the head of their key."""
    end: int
    """Exclusive end: every event before it is in the batch or set aside."""


def total_bytes(events: Sequence[OutboxEvent]) -> int:
    """Return the sum of ``event_bytes`` over the events, without a call per event."""
    return (
        sum(map(len, filter(None, map(_payload, events))))
        + sum(map(len, filter(None, map(_headers, events))))
        + sum(map(len, map(_tags, events)))
    )


def choose(
    events: Sequence[OutboxEvent], start: int, limits: Limits, parked: Collection[str], bytes: int
) -> BatchChoice:
    """Return the next batch from ``start`` on. It is empty only if all remaining events are set aside.

    ``bytes``: total size of ``events``. If all of them fit into one batch, the slice is not measured again.
    """
    if not parked and not limits.one_per_key:  # usually: the batch is a slice, found without a check of each event
        end = min(start + limits.messages, len(events))
        if bytes <= limits.bytes or total_bytes(events[start:end]) <= limits.bytes:
            return BatchChoice(range(start, end), (), end)
    return _choose_one_by_one(events, start, limits, parked)


def _choose_one_by_one(
    events: Sequence[OutboxEvent], start: int, limits: Limits, parked: Collection[str]
) -> BatchChoice:
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
    return BatchChoice(sent, aside, end)
