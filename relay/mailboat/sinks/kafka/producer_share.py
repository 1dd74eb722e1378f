"""One sink's part of a session: its topic, its calls, its share of the producer's queue.

Order is kept within a share only: a share hands over its calls one after the other, independently of other shares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException

from mailboat.errors import DeliveryError, EventRefused, Undecided
from mailboat.model import Message
from mailboat.sinks.kafka.kafka_errors import Report, refused
from mailboat.sinks.key_fence import FenceTicket

if TYPE_CHECKING:
    from mailboat.sinks.kafka.producer import ProducerEpoch

_SLICE: Final = 1_000  # messages handed over before control returns to the event loop
_FULL_QUEUE_PAUSE: Final = 0.005
_MAX_PROVEN: Final = 100_000


class ProvenPartitions:
    """Partitions of a topic that have accepted a batch from one producer, and the keys that must wait for that.

    *The exception in the gapless guarantee.* A broker checks sequence numbers against the last one stored for this
    producer and partition. Before the first batch is accepted there is none, and the broker accepts any number: if the
    very first batch is refused, the second one, sent right behind it, is accepted (Apache Kafka 4.3 does so, with one
    request in flight as well as with five). So the first message of a key is sent alone until its partition has
    accepted a batch from this producer. That costs a few round trips at the start of a session and nothing after.

    ``cold``, ``first`` and ``proven`` are read directly, once per message.
    """

    def __init__(self) -> None:
        self.cold: set[int] = set()
        """Partitions that have not accepted a batch yet."""
        self.first: set[str] = set()
        """Keys whose first message is unacknowledged: no other message of these keys may be sent."""
        self.proven: set[str] = set()
        """Keys whose partition is warm, kept while other partitions are cold."""
        self._partitions = 0

    def widen(self, partitions: int) -> None:
        """Set the topic's partition count. New partitions are cold."""
        self.cold.update(range(self._partitions, partitions))
        self._partitions = max(self._partitions, partitions)

    def accepted(self, key: str, partition: int) -> None:
        """Record that the first message of a key was acknowledged."""
        self.cold.discard(partition)
        if not self.cold or len(self.proven) >= _MAX_PROVEN:
            self.proven.clear()
        if self.cold:
            self.proven.add(key)
        self.first.discard(key)


@dataclass(slots=True, eq=False, repr=False)
class PublishCall:
    share: ProducerShare
    batch: Sequence[Message]
    hold: FenceTicket
    began: float
    failures: dict[int, DeliveryError] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    unsent: int = 0
    """Index of the first message that was not handed over."""
    handed: int = 0
    """Number of messages that librdkafka accepted; ``bytes`` is the size of their payloads."""
    bytes: int = 0
    expected: int = -1
    """Number of delivery reports to expect; -1 while messages are still being handed over."""
    answered: int = 0
    errors: dict[int, Report] = field(default_factory=dict)

    def report(self, index: int, error: KafkaError | None, message: Any) -> None:
        """Record a delivery report. librdkafka calls this inside ``poll``, once per message."""
        if error is not None:
            self.errors[index] = Report.of(error, message.topic(), message.partition())
            session = self.share.session
            if not session.failed:
                session.failed = True
                asyncio.get_running_loop().call_soon(session.stop)
        self.answered += 1
        if self.answered == self.expected:
            asyncio.get_running_loop().call_soon(self.share.session.settle, self)

    def report_first(self, key: str, index: int, error: KafkaError | None, message: Any) -> None:
        """Record a delivery report of the first message of a key on a topic with cold partitions."""
        if error is None:
            self.share.proven_partitions.accepted(key, message.partition())
            self.share.session.notify()
        self.report(index, error, message)

    @property
    def all_answered(self) -> bool:
        return self.answered == self.expected


@dataclass(slots=True, eq=False, repr=False)
class ProducerShare:
    """One sink's part of a session. Hands over calls one after the other."""

    session: ProducerEpoch
    topic: str
    proven_partitions: ProvenPartitions
    at_fault: bool = False
    """True if a failure on this share, not of the connection, ended the session."""
    calls: set[PublishCall] = field(default_factory=set)
    bytes: int = 0
    """Payload bytes of the calls in flight."""
    answered_at: float = 0.0
    """Time of the last successful call."""
    reason: DeliveryError | None = None
    """Result for messages of this share that no report explains."""
    rejection: Report | None = None
    """Why librdkafka did not accept a message of this share, if the message is not the cause."""

    def begin(self, batch: Sequence[Message], hold: FenceTicket) -> PublishCall:
        call = PublishCall(self, batch, hold, asyncio.get_running_loop().time())
        self.calls.add(call)
        self.session.calls.add(call)
        return call

    async def hand_over(self, call: PublishCall, *, alone: bool = False) -> None:
        """Hand over the call's messages in order. Calls must not overlap. Returns early if the session stops."""
        blocked = set() if alone else call.hold.blocked
        session = self.session
        try:
            while call.unsent < len(call.batch) and not session.stopped:
                end = min(call.unsent + _SLICE, len(call.batch))
                if self._may_queue():
                    self._produce(call, end, blocked)
                session.expect()
                if call.unsent < end:
                    await self._room()
                elif end < len(call.batch):
                    await asyncio.sleep(0)
        finally:
            call.expected = call.handed
            if call.all_answered:
                session.settle(call)

    def _may_queue(self) -> bool:
        """Return whether the share may queue more: never more than is free, so that other shares always find room."""
        session, messages = self.session, len(self.session.producer)
        if 2 * messages < session.max_messages and 2 * session.bytes < session.max_bytes:
            return True
        own = sum(call.handed - call.answered for call in self.calls)
        return own == 0 or (own < session.max_messages - messages and self.bytes < session.max_bytes - session.bytes)

    def _produce(self, call: PublishCall, end: int, blocked: set[str | None]) -> None:
        """Produce messages up to ``end``, or until a full queue, a key's pending first message or an error stops it."""
        session, proven_partitions = self.session, self.proven_partitions
        if session.failed:
            return
        produce, batch, topic, report = session.producer.produce, call.batch, self.topic, call.report
        cold, skipped, size = proven_partitions.cold, 0, 0
        for index in range(call.unsent, end):
            _, key, value, headers, _ = batch[index]
            if blocked and key in blocked:
                call.failures[index] = Undecided("an earlier message of its key did not arrive")
                call.hold.stop(key)
                skipped += 1
                continue
            on_delivery: Callable[..., None] = partial(report, index)
            first: str | None = None
            if cold and key is not None:
                if key in proven_partitions.first:
                    break
                if key not in proven_partitions.proven:
                    first = key
                    proven_partitions.first.add(first)
                    on_delivery = partial(call.report_first, first, index)
            try:
                # Positional, since keyword arguments cost 1 µs: partition (any), callback, its alias, timestamp (now).
                produce(topic, value, key, -1, on_delivery, None, 0, headers)
            except (BufferError, KafkaException, UnicodeError, ValueError, TypeError) as error:
                if first is not None:
                    proven_partitions.first.discard(first)
                if isinstance(error, BufferError):
                    break
                refusal = _local_refusal(error, topic)
                if refusal is None:
                    self.rejection = Report.of(error.args[0], topic, -1)
                    session.stop()
                    break
                call.failures[index] = refusal
                call.hold.stop(key)
                skipped += 1
                continue
            if value is not None:
                size += len(value)
        else:
            index = end
        call.handed += index - call.unsent - skipped
        call.unsent = index
        call.bytes += size
        self.bytes += size
        session.bytes += size

    async def _room(self) -> None:
        """Wait until a key's first message was acknowledged, or the queue may have room."""
        if self.proven_partitions.first and not self.session.stopped:
            await self.session.changed()
        else:
            await asyncio.sleep(_FULL_QUEUE_PAUSE)

    def reports(self) -> list[Report]:
        found = [report for call in self.calls for report in call.errors.values()]
        return [*found, self.rejection] if self.rejection is not None else found

    async def idle(self) -> None:
        """Wait until no call of this share is in flight."""
        while self.calls:
            await self.session.changed()

    def withdraw(self, call: PublishCall, reason: DeliveryError) -> bool:
        """Finish a call that was not handed over completely. Returns False if any of its messages is in flight."""
        if self.session.stopped or call.errors or not call.all_answered:
            return False
        call.failures |= call.hold.fail(call.batch, range(call.unsent, len(call.batch)), reason)
        self.session.finish(call)
        return True

    def time_out(self, call: PublishCall, reason: DeliveryError) -> None:
        """End the session after a call timed out. If other shares succeeded since it began, this share is at fault."""
        if any(other.answered_at > call.began for other in self.session.shares if other is not self):
            self.at_fault = True
        elif not self.session.stopped:
            self.session.reason = reason
        self.stop(reason)

    def stop(self, reason: DeliveryError, *, in_flight: bool = True) -> None:
        """End the session; ``reason`` is the result for messages of this share that no report explains. Without
        ``in_flight``, messages already on the wire are not purged and may still be acknowledged."""
        if not self.session.stopped:
            self.reason = reason
        self.session.stop(in_flight=in_flight)


def _local_refusal(error: Exception, topic: str) -> EventRefused | None:
    """Return why librdkafka rejected one message locally; None if the message is not the cause."""
    if not isinstance(error, KafkaException):
        return EventRefused(f"its key or headers can't be sent: {error}", reason="InvalidText", retryable=False)
    if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return refused(Report.of(error.args[0], topic, -1))
    return None
