"""An event as a handler gets it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event, and how often it was tried."""

    id: UUID
    type: str
    key: str | None = None
    payload: bytes | None = None
    """None: a tombstone."""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    traceparent: str | None = None
    created_at: datetime
    attempt: int = 1
    """1: the first."""
    redeliveries: int = 0
    """Earlier deliveries that neither ended well nor were refused: their consumer died, or lost its connection."""
    replay: bool = False
    """A dead letter that a person replayed."""
    position: int = 0
    partition: int = 0
    group: str | None = None
    """Of ``delivery.groupBy``; None: it belongs to no group."""

    def json(self) -> Any:
        """The payload, parsed as JSON."""
        return None if self.payload is None else json.loads(self.payload)
