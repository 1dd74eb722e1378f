"""The event that a handler receives."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event and its number of attempts."""

    id: UUID
    type: str
    key: str | None = None
    payload: bytes | None = None
    """None for a tombstone."""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    traceparent: str | None = None
    created_at: datetime
    attempt: int = 1
    """Number of this attempt, starting at 1."""
    redeliveries: int = 0
    """Earlier deliveries that were neither committed nor refused: the consumer died or lost its connection."""
    replay: bool = False
    """True for a replayed dead letter."""
    position: int = 0
    partition: int = 0
    group: str | None = None
    """Group by ``delivery.groupBy``; None if the event belongs to no group."""

    def json(self) -> Any:
        """Return the payload, parsed as JSON."""
        return None if self.payload is None else json.loads(self.payload)


class EventDraft:
    """An event that is being made. Its constructor turns it into an ``Event``, at a fifth of the cost of the generated
    one, which sets each field of a frozen class by a call."""

    __slots__ = tuple(each.name for each in fields(Event))

    def __init__(
        self,
        id: UUID,
        type: str,
        key: str | None,
        payload: bytes | None,
        content_type: str,
        headers: Mapping[str, str],
        aggregate_type: str | None,
        aggregate_id: str | None,
        traceparent: str | None,
        created_at: datetime,
        replay: bool,
        position: int,
        partition: int,
    ) -> None:
        self.id = id
        self.type = type
        self.key = key
        self.payload = payload
        self.content_type = content_type
        self.headers = headers
        self.tags = ()
        self.aggregate_type = aggregate_type
        self.aggregate_id = aggregate_id
        self.traceparent = traceparent
        self.created_at = created_at
        self.attempt = 1
        self.redeliveries = 0
        self.replay = replay
        self.position = position
        self.partition = partition
        self.group = None
        self.__class__ = Event  # type: ignore[assignment]
