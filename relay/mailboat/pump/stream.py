"""One subscription as its pumps see it: policy, sink and encoder, shared by all of its partitions in this relay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from mailboat.errors import EventRefused
from mailboat.events import Event, Outgoing
from mailboat.pump.points import Passing, unheard
from mailboat.pump.retry import DEAD_TOPIC_BACKOFF, Outage, Policy
from mailboat.sinks.protocol import Sink

Clock = Callable[[], float]
"""Monotonic seconds."""


class Encoder(Protocol):
    """Makes a sink's message of an event. Raises ``EventRefused`` for an event that can't be one."""

    def encode(
        self, event: Event, *, sequence: int, partition: int, generation: int, attempt: int, replay: bool = False
    ) -> Outgoing: ...

    def encode_all(
        self, events: Iterable[Event], sequences: Iterable[int], *, partition: int, generation: int
    ) -> Iterator[Outgoing]: ...


@dataclass(frozen=True, slots=True)
class DeathNotice:
    """What the dead-letter topic is told about an event."""

    event: Event
    sequence: int
    partition: int
    generation: int
    attempts: int
    reason: str
    error: str
    first_failed_at: str | None


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a subscription is delivered."""

    batch_size: int
    timeout: float
    policy: Policy
    batch_bytes: int = 4 * 1024 * 1024
    """Bytes of events in a batch, and waiting in front of a partition: large events must not fill the memory."""
    ordered: bool = True
    """Whether the events of a key keep their order; if not, a failed event holds up nobody."""
    flights: int = 2
    """Batches of one partition that may be on the way at once, on a sink that keeps order among them."""
    max_parked: int = 10_000
    """Parked events of one partition above which it takes nothing new: a destination that refuses everything must
    not copy the whole outbox into the parking lot."""


@dataclass(slots=True)
class DeadTopic:
    """Whether the dead-letter topic takes notices, as far as any partition has found out."""

    trouble: str | None = None
    outage: Outage = field(default_factory=lambda: Outage(DEAD_TOPIC_BACKOFF))
    not_before: float = 0.0


@dataclass(slots=True)
class Stream:
    """A subscription being delivered."""

    number: int
    name: str
    generation: int
    sink: Sink
    encoder: Encoder
    settings: StreamSettings
    announce: Callable[[DeathNotice], Outgoing] | None
    """Makes the message for the dead-letter topic; None: dead letters are kept in the table only."""
    dead_topic: DeadTopic = field(default_factory=DeadTopic)
    ready: bool = False
    """Whether the sink is open: before, nothing is handed over."""
    trouble: str | None = None
    """Why it is not."""
    fault: str | None = None
    """What the sink did last that no sink should do; None once it answers properly."""
    pulled: bool = False
    """Its partitions belong to consumers, who take the events; relays report its lag."""
    clock: Clock = time.monotonic
    random: Random = field(default_factory=Random)
    passing: Passing = unheard

    def refusal(self, message: Outgoing) -> EventRefused | None:
        """Why the sink would refuse this message, as far as can be told here."""
        return self.sink.refusal(message)
