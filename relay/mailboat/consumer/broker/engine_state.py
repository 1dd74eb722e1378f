"""Settings, counters and state of an engine."""

from dataclasses import dataclass
from typing import Final

from mailboat.consumer.broker.interfaces import SourceState
from mailboat.consumer.dispatch import Counts
from mailboat.delivery.backoff import Backoff

_BACKOFF: Final = Backoff(initial=1.0, factor=2, ceiling=60.0, jitter=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine, from the subscription."""

    consumer: str
    """``namespace/name``."""
    group: str | None = None
    """Kafka consumer group, for dead letters."""
    concurrency: int = 32
    max_attempts: int = 4
    backoff: Backoff = _BACKOFF
    timeout: float | None = None
    """Seconds that a handler may take."""
    stop_at: int | None = None
    """Number of consecutive dead letters that stops the subscription."""
    handle_unclaimed: bool = False
    """``onUnavailable: Handle``: without the claim store, handle events without remembering them."""


@dataclass(slots=True)
class EngineCounts:
    """Counters since the process started, beside those of the dispatcher."""

    received: int = 0
    duplicates: int = 0
    """Events skipped because they were done."""
    skipped: int = 0
    """Replayed dead letters that are addressed to another consumer."""
    dead: int = 0
    takeovers: int = 0
    """Events whose earlier consumer died."""
    overlaps: int = 0
    """Results that came after the claim was lost: another consumer may have handled the event as well."""
    unclaimed: int = 0
    """Events handled without the claim store."""


@dataclass(frozen=True, slots=True)
class ParkedLane:
    """A lane that waits."""

    partition: int
    key: str | None
    event_id: str
    event_type: str
    attempts: int
    cause: str
    retry_in: float | None
    """None: until a person acts."""
    behind: int
    """Later events of the key."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What /status and /metrics show of an engine."""

    source: SourceState
    counts: Counts
    engine: EngineCounts
    running: int
    ready: int
    behind: int
    """Events that wait for an earlier event of their key."""
    parked: int
    lanes: list[ParkedLane]
    """The first parked lanes."""
    claims_error: str | None
    dead_letters_error: str | None
    stopped: str | None
    """Reason for which the engine stopped to start events (``stopAt``); None if it starts them."""
    blocked_by: str | None
    """Handler that blocks the event loop."""
