"""One subscription in delivery: policy, sink and encoder, shared by its partitions in this relay; and their session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from mailboat.cloudevents import MessageEncoder
from mailboat.delivery.backoff import Backoff
from mailboat.delivery.batching import Limits
from mailboat.delivery.counters import DeliveryHistograms
from mailboat.sinks.protocol import Sink
from mailboat.store.outbox_store import CursorKey, Opened

if TYPE_CHECKING:
    from mailboat.delivery.progress import ProgressCommitter
    from mailboat.delivery.window_feeder import WindowFeeder

log = logging.getLogger(__name__)

STILL_EVERY = 600.0
"""Seconds between two lines of an outage that lasts."""

Clock = Callable[[], float]
"""Monotonic seconds."""


class Checkpoint(Enum):
    """A point of the delivery cycle, reported as a relay passes it. Production ignores the reports. Tests wait for a
    point, and kill the process at every point to prove that no event is lost."""

    CLAIMED = "claimed"
    WINDOW_OPENED = "window-opened"
    CHUNK_READ = "chunk-read"
    BATCH_TAKEN = "batch-taken"
    HANDED_OVER = "handed-over"
    ANSWERED = "answered"
    SETTLING = "settling"
    SETTLED = "settled"
    PARKED_TRIED = "parked-tried"
    DEAD_ANNOUNCED = "dead-announced"
    RELEASED = "released"


CheckpointHook = Callable[[Checkpoint], None]


def ignore_checkpoint(point: Checkpoint) -> None:
    """Ignore the point."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    batch_size: int
    timeout: float
    max_attempts: int
    backoff: Backoff
    """Delay of the attempts after a refusal."""
    dead_letters: bool
    """If False, an event without attempts left blocks its key until a person decides."""
    batch_bytes: int = 4 * 1024 * 1024
    """Limit for the bytes of a batch and of a partition's inbox, so that large events do not exhaust memory."""
    ordered: bool = True
    """Whether the events of a key keep their order. If not, a failed event delays no other event."""
    max_in_flight: int = 2
    """Maximum of batches in flight per partition, on a sink that keeps order among them."""
    max_parked: int = 10_000
    """Number of parked events at which a partition takes no new events. Otherwise a destination that refuses everything
    would copy the whole outbox into the table of parked events."""

    def exhausted(self, attempts: int, retryable: bool) -> bool:
        """Return whether an event with this number of attempts gets no further one."""
        return not retryable or attempts >= self.max_attempts


@dataclass(slots=True)
class DeadTopic:
    """Availability of the dead-letter topic, shared by all partitions."""

    problem: str | None = None
    failures: int = 0
    """Consecutive notices without a definite result."""
    not_before: float = 0.0


@dataclass(slots=True)
class SinkHealth:
    """Outage of one sink, and its log lines. It begins with the first partition that can't deliver and ends when every
    partition of this relay can again, so that one broker that is away does not fill the log with changes."""

    subscription: str
    _unavailable: dict[int, str] = field(default_factory=dict)
    """Reason by partition that can't deliver. -1 stands for the sink that is not open yet."""
    _since: float = 0.0
    _logged_at: float = 0.0

    @property
    def reason(self) -> str | None:
        return self._unavailable[min(self._unavailable)] if self._unavailable else None

    def unavailable(self, reason: str, now: float, partition: int = -1) -> None:
        if not self._unavailable:
            self._since = self._logged_at = now
            log.warning("Sink unavailable: %s", reason, extra={"subscription": self.subscription})
        elif now - self._logged_at >= STILL_EVERY:
            self._logged_at = now
            about = {"subscription": self.subscription, "seconds": round(now - self._since)}
            log.warning("Sink still unavailable: %s", reason, extra=about)
        self._unavailable[partition] = reason

    def reachable(self, now: float, partition: int = -1) -> None:
        if self._unavailable.pop(partition, None) is not None and not self._unavailable:
            about = {"subscription": self.subscription, "seconds": round(now - self._since, 1)}
            log.info("Sink reachable again", extra=about)

    def released(self, partition: int) -> None:
        """Forget a partition that this relay does not own any more. Whether its outage has ended is unknown here."""
        self._unavailable.pop(partition, None)


@dataclass(slots=True)
class Stream:
    number: int
    name: str
    generation: int
    sink: Sink
    encoder: MessageEncoder
    settings: StreamSettings
    dead_topic: DeadTopic = field(default_factory=DeadTopic)
    ready: bool = False
    """Whether the sink is open. Nothing is published before."""
    fault: str | None = None
    """Last contract violation of the sink; None once a call succeeds."""
    dead_letter_topic: str | None = None
    """If None, dead letters are stored in the table only."""
    pulled: bool = False
    """The partitions belong to pull consumers; relays only report the lag."""
    clock: Clock = time.monotonic
    random: Random = field(default_factory=Random)
    on_checkpoint: CheckpointHook = ignore_checkpoint
    meters: DeliveryHistograms = field(default_factory=DeliveryHistograms)
    health: SinkHealth = field(init=False)

    def __post_init__(self) -> None:
        self.health = SinkHealth(self.name)

    def limits(self, *, one_by_one: bool) -> Limits:
        settings, traits = self.settings, self.sink.traits
        return Limits(
            messages=1 if one_by_one else min(settings.batch_size, traits.max_batch_messages),
            bytes=min(settings.batch_bytes, traits.max_batch_bytes),
            one_per_key=settings.ordered and not traits.stops_behind_failure,
        )


class DeliverySession(Protocol):
    """The connected period of a relay, as partition workers, readers and the committer see it.

    The session owns the partitions, their leases and all tasks. ``runtime.session`` implements it. The classes of this
    package never call each other across partitions; they call the session.
    """

    committer: ProgressCommitter

    def window_opened(self, opened: Opened) -> None:
        """Pass the events of a newly opened window to the workers of its partitions."""

    def lease_lost(self, key: CursorKey) -> None:
        """Stop the worker of a partition that another relay owns, without settling (G5)."""

    def lease_left(self) -> float:
        """Return the seconds for which this relay may publish under its leases."""

    def read(self, reader: WindowFeeder) -> None:
        """Start a reader as a task of the session."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task of the session. If it fails, the session ends with its error."""
