"""One sink's part of a session: its topic, its calls, its share of the producer's queue.

Order matters within a lane only: its calls are handed over one after the other, those of different lanes independently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException

from mailboat.errors import DeliveryError, EventRefused, Undecided
from mailboat.events import Outgoing
from mailboat.sinks.kafka.errors import Report, refused
from mailboat.sinks.kafka.warmth import Warmth
from mailboat.sinks.key_stops import CallHold

if TYPE_CHECKING:
    from mailboat.sinks.kafka.session import Session

_SLICE: Final = 1_000  # messages handed over before the event loop gets its turn
_FULL_QUEUE_PAUSE: Final = 0.005


class Call:
    """One ``publish`` on its way through a session."""

    __slots__ = (
        "answered",
        "batch",
        "began",
        "bytes",
        "done",
        "errors",
        "expected",
        "failures",
        "handed",
        "hold",
        "lane",
        "unsent",
    )

    def __init__(self, lane: Lane, batch: Sequence[Outgoing], hold: CallHold, began: float) -> None:
        self.lane = lane
        self.batch = batch
        self.hold = hold
        self.began = began
        self.failures: dict[int, DeliveryError] = {}
        self.done = asyncio.Event()
        self.unsent = 0
        """From this index on nothing was handed over."""
        self.handed = 0
        """Messages that librdkafka has taken, and their payload's bytes."""
        self.bytes = 0
        self.expected = -1
        """How many reports will come; -1 while messages are still being handed over."""
        self.answered = 0
        self.errors: dict[int, Report] = {}

    def report(self, index: int, error: KafkaError | None, message: Any) -> None:
        """Called by librdkafka, inside of a poll, once per message."""
        if error is not None:
            self.errors[index] = Report.of(error, message.topic(), message.partition())
            self.lane.session.report_failure()
        self.answered += 1
        if self.answered == self.expected:
            self.lane.session.report_answered(self)

    def report_first(self, key: str, index: int, error: KafkaError | None, message: Any) -> None:
        """The same for the first message of a key on a topic that is not warm."""
        if error is None:
            self.lane.warmth.accepted(key, message.partition())
            self.lane.session.stir()
        self.report(index, error, message)

    @property
    def answered_for(self) -> bool:
        return self.answered == self.expected


class Lane:
    """One sink's part of a session. Calls are handed over one after the other."""

    def __init__(self, session: Session, topic: str, warmth: Warmth) -> None:
        self.session = session
        self.warmth = warmth
        self.at_fault = False
        """Whether a failure on this lane, and not the connection, ended the session."""
        self.calls: set[Call] = set()
        self.bytes = 0
        """Payload of the calls on the way."""
        self.answered_at = 0.0
        """When a call last went well."""
        self.reason: DeliveryError | None = None
        """The answer for messages of this lane that no report explains."""
        self.objection: Report | None = None
        """Why librdkafka would not take a message of this lane, if it was not about the message."""
        self._topic = topic

    def begin(self, batch: Sequence[Outgoing], hold: CallHold) -> Call:
        call = Call(self, batch, hold, asyncio.get_running_loop().time())
        self.calls.add(call)
        self.session.calls.add(call)
        return call

    async def hand_over(self, call: Call, *, alone: bool = False) -> None:
        """In order, and not at the same time as another call. Returns early when the session stops."""
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
            if call.answered_for:
                session.settle(call)

    def _may_queue(self) -> bool:
        """A lane never has more in the queue than is free, so that others always find room."""
        messages, max_messages, size, max_size = self.session.queue
        if 2 * messages < max_messages and 2 * size < max_size:
            return True
        own = sum(call.handed - call.answered for call in self.calls)
        return own == 0 or (own < max_messages - messages and self.bytes < max_size - size)

    def _produce(self, call: Call, end: int, blocked: set[str | None]) -> None:
        """Up to ``end``, or to where there is no going on just now."""
        session, warmth = self.session, self.warmth
        if session.failed:
            return
        produce, batch, topic, report = session.producer.produce, call.batch, self._topic, call.report
        cold, skipped, size = warmth.cold, 0, 0
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
                if key in warmth.first:
                    break
                if key not in warmth.proven:
                    first = key
                    warmth.first.add(first)
                    on_delivery = partial(call.report_first, first, index)
            try:
                # By position, as names cost a microsecond: partition (any), callback, its alias, timestamp (now).
                produce(topic, value, key, -1, on_delivery, None, 0, headers)
            except BufferError:
                self._forget_first(first)
                break
            except (KafkaException, UnicodeError, ValueError, TypeError) as error:
                refusal = _local_refusal(error, topic)
                if refusal is None:
                    self.objection = Report.of(error.args[0], topic, -1)
                    session.stop()
                    break
                self._forget_first(first)
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

    def _forget_first(self, key: str | None) -> None:
        if key is not None:
            self.warmth.first.discard(key)

    async def _room(self) -> None:
        """Wait until it makes sense to go on: a key's first message was answered for, or the queue may have room."""
        if self.warmth.first and not self.session.stopped:
            await self.session.stirred()
        else:
            await asyncio.sleep(_FULL_QUEUE_PAUSE)

    def reports(self) -> list[Report]:
        """All bad news of this lane."""
        found = [report for call in self.calls for report in call.errors.values()]
        return [*found, self.objection] if self.objection is not None else found

    async def idle(self) -> None:
        """Returns once no call of this lane is on the way."""
        while self.calls:
            await self.session.stirred()

    def withdraw(self, call: Call, reason: DeliveryError) -> bool:
        """Answer a call that was not handed over to its end. False if anything of it is on the way."""
        if self.session.stopped or call.errors or not call.answered_for:
            return False
        for index in range(call.unsent, len(call.batch)):
            call.failures[index] = reason
            call.hold.stop(call.batch[index].key)
        self.session.finish(call)
        return True

    def time_out(self, call: Call, reason: DeliveryError) -> None:
        """End the session: the time of a call is up. If others got answers meanwhile, the fault is with this lane."""
        if self.session.answered_others(self, since=call.began):
            self.at_fault = True
        elif not self.session.stopped:
            self.session.reason = reason
        self.stop(reason)

    def stop(self, reason: DeliveryError, *, in_flight: bool = True) -> None:
        """End the session. ``reason`` is the answer for messages of this lane that no report explains.

        Without ``in_flight`` what is on the wire already may still be answered for.
        """
        if not self.session.stopped:
            self.reason = reason
        self.session.stop(in_flight=in_flight)

    def leave(self) -> None:
        """The sink will not use this lane any more. No call of it is on the way."""
        self.session.leave(self)


def _local_refusal(error: Exception, topic: str) -> EventRefused | None:
    """What librdkafka says about one message before it takes it; None: it is not about the message."""
    if not isinstance(error, KafkaException):
        return EventRefused(f"its key or headers can't be sent: {error}", reason="InvalidText", retryable=False)
    if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return refused(Report.of(error.args[0], topic, -1))
    return None
