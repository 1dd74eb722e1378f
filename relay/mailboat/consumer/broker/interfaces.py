"""Types between the engine for broker sources, its sources, its claim stores and its dead letters."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from mailboat.consumer.dispatch import Scope
from mailboat.consumer.handler_outcomes import Refusal
from mailboat.consumer.points import BrokerPoint as BrokerPoint
from mailboat.consumer.points import PassingPoint as PassingPoint
from mailboat.consumer.points import ignore_point as ignore_point
from mailboat.consumer.received_event import Event
from mailboat.errors import MailboatError


@dataclass(slots=True, kw_only=True)  # not frozen: that would double the cost of making one
class Original:
    """The message as the broker delivered it. A dead letter contains all of it, so that a replay can restore it."""

    topic: str
    """Kafka topic, or Pub/Sub subscription."""
    partition: int | None
    offset: int | str
    """Kafka offset, or Pub/Sub message id."""
    timestamp: datetime | None
    key: bytes | None
    value: bytes | None
    """None for a tombstone."""
    headers: tuple[tuple[str, bytes], ...]
    """Kafka headers, or Pub/Sub attributes as UTF-8."""


@dataclass(slots=True, kw_only=True)
class Record:
    """A message that the engine handles."""

    event: Event
    """For a message that can't be decoded, an event with the original payload and an id made from its coordinates."""
    original: Original
    partition: int
    """Unit of assignment and of drains: the Kafka partition; 0 for Pub/Sub."""
    handle: Any = None
    """The source's reference to the message; the source sets it after decoding."""
    cannot_decode: str | None = None
    """Why the message is not an event; None if it is one."""
    replay_for: str | None = None
    """``namespace/name`` of the only consumer that handles this replayed dead letter; None for all consumers."""

    @property
    def lane(self) -> tuple[int, str] | None:
        """Records of one lane are handled one at a time, in order. None: a record without a key has no order."""
        return None if self.event.key is None else (self.partition, self.event.key)


Decode = Callable[[Original], Record]
"""A broker's message as a record (``decode`` module). Never fails: see ``Record.cannot_decode``."""


# -- sources ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition that this process owns."""

    lag: int | None
    """Messages in the broker that are not committed; None if unknown."""
    ahead: int
    """Records received and not committable yet."""
    oldest: datetime | None
    """Timestamp of the first of them."""
    paused: bool = False
    """True while the run-ahead is at its bound."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """What a source reports to /status and /metrics."""

    connected: bool = False
    error: str | None = None
    """Why the broker is unavailable; None if it is available."""
    partitions: Mapping[int, PartitionState] = field(default_factory=dict)


class Receiver(Protocol):
    """The engine, as a source sees it. All methods run in the engine's event loop."""

    def take(self, records: Iterable[Record]) -> None:
        """Accept records. Records of one partition arrive in the order of the broker."""

    async def revoke(self, partitions: Iterable[int], within: float) -> None:
        """Stop starting records of these partitions, wait up to ``within`` seconds for running handlers, and forget the
        others. Handlers that are still running then are cancelled and their claims released."""

    def lose(self, partitions: Iterable[int]) -> None:
        """Forget the records of these partitions at once: another consumer may already have them. Running handlers
        finish, and their results are not reported to the source."""


class Source(Protocol):
    """A broker's consumer. It owns the client, bounds the run-ahead, and commits or acknowledges settled records."""

    async def start(self, receiver: Receiver) -> None:
        """Connect and begin to deliver. Waits with back-off if the broker is unavailable; a wrong configuration raises
        ConfigError."""

    def settle(self, record: Record) -> None:
        """The record is finished: handled, ignored, skipped as a duplicate, or stored as a dead letter.

        Kafka commits up to the first record that is not settled. Pub/Sub acknowledges the message.
        """

    def release(self, record: Record) -> None:
        """The record was not handled and will not be by this consumer. Kafka: nothing to do; Pub/Sub: nack."""

    def state(self) -> SourceState:
        """Return the state from values in memory, without a request to the broker."""

    async def stop(self) -> None:
        """Stop delivering, call ``revoke`` for all partitions, commit settled offsets, disconnect."""


# -- claim stores ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """The event is ours: handle it. ``attempt`` counts from 1 and includes attempts that a dead consumer began."""

    attempt: int
    redeliveries: int = 0
    """How many of the earlier attempts ended without a result: their consumer died."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The event needs no handling: it is done (``dead`` False), or a dead letter (``dead`` True)."""

    dead: bool = False


@dataclass(frozen=True, slots=True)
class Busy:
    """Another consumer holds the claim, or the next attempt is not due. Ask again after ``seconds``."""

    seconds: float


ClaimReply = Claimed | Finished | Busy


class ClaimsUnavailable(MailboatError):
    """The claim store can't be reached, or refuses to write. No attempt is counted."""


class Claim(NamedTuple):  # a tuple, since one is made for every event
    """An event that the engine wants to start. ``replay`` reopens the claim of a dead letter."""

    event_id: str
    replay: bool = False


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt. The event may be claimed again after ``retry_in`` seconds."""

    event_id: str
    retry_in: float
    counted: bool = True


class ClaimStore(Protocol):
    """Remembers events of one consumer. Each method takes many events and makes one round trip where it can.

    The store renews the leases of its claims by itself, in a thread, until ``done``, ``fail``, ``dead`` or ``release``.
    Every method may raise ClaimsUnavailable.
    """

    async def open(self) -> None: ...

    async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]: ...

    async def done(self, event_ids: Sequence[str]) -> list[bool]:
        """Mark as done. False: the claim was lost to another consumer in the meantime (an overlap)."""

    async def fail(self, failures: Sequence[FailedAttempt]) -> list[bool]: ...

    async def dead(self, event_ids: Sequence[str]) -> list[bool]:
        """Mark as dead, after the dead letter is stored."""

    async def release(self, event_ids: Sequence[str]) -> None:
        """Give claims back: nobody began to handle these events. The attempt is not counted."""

    async def close(self) -> None: ...


Dispatch = Callable[[Event, Scope], Coroutine[Any, Any, bool]]
"""``Dispatcher.handle_one``: runs the handlers of an event and returns True."""


class Execution(Protocol):
    """Runs the handlers of one event: without a transaction, or inside the transaction of the inbox."""

    def run(self, event: Event, dispatch: Dispatch) -> Coroutine[Any, Any, bool]:
        """Run ``dispatch(event, scope)`` and return True; return False if the inbox knows the event: it is done."""

    async def close(self) -> None: ...


# -- dead letters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRecord:
    """A record that will not be handled, and why."""

    record: Record
    refusal: Refusal
    """``reason`` is NoHandler, HandlerFailed, Refused, CannotDecode, TimedOut or ConsumerDied."""
    attempts: int
    first_failed: datetime
    failed_at: datetime
    consumer: str
    """``namespace/name`` of the subscription."""
    group: str | None = None
    """Kafka consumer group."""


class DeadLetters(Protocol):
    """Writes dead letters to the dead-letter topic."""

    async def open(self) -> None: ...

    async def write(self, letter: DeadRecord) -> None:
        """Return when the broker has acknowledged the dead letter. Raises DeadLettersUnavailable otherwise: the event
        stays parked, and nothing is committed past it."""

    async def close(self) -> None: ...


class DeadLettersUnavailable(MailboatError):
    """The dead-letter topic can't be reached, does not exist, or refuses the message."""


CONSUMER_DIED: Final = "ConsumerDied"
TIMED_OUT: Final = "TimedOut"
