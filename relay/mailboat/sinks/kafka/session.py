"""One librdkafka producer, from its first message to its first failure.

librdkafka keeps order among what is in flight, but only as long as nothing fails. So a session ends with the first
message that does not arrive, for whatever reason: everything that is still on the way is purged, every call that has
messages in it gets its answer, and the next message goes to a new session.

*The hole in the gap-less guarantee.* A broker checks sequence numbers against the last one it knows of this producer
and partition. It knows none before the first batch is accepted, and then takes any: if the very first batch is refused,
the second one, sent right behind it, is accepted (Apache Kafka 4.3 does so, with one request in flight as well as with
five). So the first message of a key goes alone until the partition it falls on has accepted something from this
producer. That costs a few round trips at the start of a session, and nothing after.

*Who hears the client out.* librdkafka tells its reports to whoever polls, one call of ours per message, and each takes
the interpreter's lock for itself. A thread that polls would fight with the event loop for that lock twenty thousand
times a second; so the loop polls, by a timer that is quick while answers are due and slow otherwise. Everything here
runs on the event loop; only the end of a producer, which may block, has a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from mailboat.errors import DeliveryError, EventRefused, Undecided
from mailboat.events import Outgoing
from mailboat.sinks.kafka.errors import Report, Verdicts, more_telling, refused
from mailboat.sinks.key_stops import CallHold

_SLICE: Final = 1_000  # messages handed over before the event loop gets its turn
_FULL_QUEUE_PAUSE: Final = 0.005
_QUICK: Final = 0.0005  # seconds between polls while answers are due; the loop rounds it up to its next millisecond
_SLOW: Final = 0.2  # while none are: the client may have something to complain about
_PATIENCE: Final = 0.1  # of the time that answers have been due: a slow broker is not asked a thousand times a second
_MAX_PROVEN: Final = 100_000


class Call:
    """One ``publish`` on its way through a session."""

    __slots__ = ("answered", "batch", "done", "errors", "expected", "failures", "hold", "session", "unsent")

    def __init__(self, session: Session, batch: Sequence[Outgoing], hold: CallHold) -> None:
        self.session = session
        self.batch = batch
        self.hold = hold
        self.failures: dict[int, DeliveryError] = {}
        self.done = asyncio.Event()
        self.unsent = 0
        """From this index on nothing was handed over."""
        self.expected = -1
        """How many reports will come; -1 while messages are still being handed over."""
        self.answered = 0
        self.errors: dict[int, Report] = {}

    def report(self, index: int, error: KafkaError | None, message: Any) -> None:
        """Called by librdkafka, inside of a poll, once per message."""
        if error is not None:
            self.errors[index] = Report.of(error, message.topic(), message.partition())
            self.session.report_failure()
        self.answered += 1
        if self.answered == self.expected:
            self.session.report_answered(self)

    def report_first(self, key: str, index: int, error: KafkaError | None, message: Any) -> None:
        """The same for the first message of a key in a cold session."""
        if error is None:
            self.session.report_warmth(key, message.partition())
        self.report(index, error, message)

    @property
    def answered_for(self) -> bool:
        return self.answered == self.expected


class Session:
    """Takes calls until the first failure: then it is ``stopped``, and ``drained`` once every call has its answer."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        topic: str,
        partitions: int,
        *,
        logger: logging.Logger,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time()
        self.stopped = False
        self.drained = asyncio.Event()
        self.complaint: Report | None = None
        """What the client said about its connections since a call last went well."""
        self._topic = topic
        self._bootstrap: str = settings["bootstrap.servers"]
        self._calls: set[Call] = set()
        self._otherwise: DeliveryError = Undecided("the producer was stopped")
        self._fatal: Report | None = None
        self._stirred = asyncio.Event()
        self._failed = False  # something did not arrive: hand over no more
        self._cold = set(range(partitions))
        self._proven: set[str] = set()
        self._first: set[str] = set()
        self._retired = False
        self._producer: Any = Producer({**settings, "logger": logger, "error_cb": self._complain})
        self._ending: threading.Thread | None = None
        self._heard_at = self.started_at
        self._timer = self._loop.call_later(_SLOW, self._listen)

    # ---- the way of a call -----------------------------------------------------------------------------------------

    def begin(self, batch: Sequence[Outgoing], hold: CallHold) -> Call:
        call = Call(self, batch, hold)
        self._calls.add(call)
        return call

    async def hand_over(self, call: Call, *, alone: bool = False) -> None:
        """In order, and not at the same time as another call. Returns early when the session stops."""
        blocked = set() if alone else call.hold.blocked
        skipped = 0
        try:
            while call.unsent < len(call.batch) and not self.stopped:
                end = min(call.unsent + _SLICE, len(call.batch))
                skipped += self._produce(call, end, blocked)
                self._expect()
                if call.unsent < end:
                    await self._room()
                elif end < len(call.batch):
                    await asyncio.sleep(0)
        finally:
            call.expected = call.unsent - skipped
            if call.answered_for:
                self._settle(call)

    def _produce(self, call: Call, end: int, blocked: set[str | None]) -> int:
        """Up to ``end``, or to where there is no going on just now; how many of them were not handed over after all."""
        if self._failed:
            return 0
        produce, batch, topic, report = self._producer.produce, call.batch, self._topic, call.report
        skipped = 0
        for index in range(call.unsent, end):
            _, key, value, headers, _ = batch[index]
            if blocked and key in blocked:
                call.failures[index] = Undecided("an earlier message of its key did not arrive")
                call.hold.stop(key)
                call.unsent = index + 1
                skipped += 1
                continue
            on_delivery: Callable[..., None] = partial(report, index)
            first: str | None = None
            if self._cold and key is not None:
                if key in self._first:
                    return skipped
                if key not in self._proven:
                    first = key
                    self._first.add(first)
                    on_delivery = partial(call.report_first, first, index)
            try:
                # By position, as names cost a microsecond: partition (any), callback, its alias, timestamp (now).
                produce(topic, value, key, -1, on_delivery, None, 0, headers)
            except BufferError:
                self._forget_first(first)
                return skipped
            except (KafkaException, UnicodeError, ValueError, TypeError) as error:
                refusal = _local_refusal(error, topic)
                if refusal is None:
                    self._fatal = Report.of(error.args[0], topic, -1)
                    self.stop()
                    return skipped
                self._forget_first(first)
                call.failures[index] = refusal
                call.hold.stop(key)
                skipped += 1
            call.unsent = index + 1
        return skipped

    def _forget_first(self, key: str | None) -> None:
        if key is not None:
            self._first.discard(key)

    async def _room(self) -> None:
        """Wait until it makes sense to go on: a key's first message was answered for, or the queue may have room."""
        if self._first and not self.stopped:
            self._stirred.clear()
            await self._stirred.wait()
        else:
            await asyncio.sleep(_FULL_QUEUE_PAUSE)

    def _settle(self, call: Call) -> None:
        """All reports of a call are in. Good news goes out at once, bad news when all of it is known."""
        if call not in self._calls:
            return
        if not call.errors and call.unsent == len(call.batch):
            self.complaint = None
            self._calls.discard(call)
            call.done.set()
            self._stirred.set()
        if self.stopped:
            self._drain()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def stop(self, otherwise: DeliveryError | None = None, *, in_flight: bool = True) -> None:
        """Send nothing more. ``otherwise`` is the answer for messages that nothing else explains.

        Without ``in_flight`` what is on the wire already may still be answered for.
        """
        if self._retired:
            return
        if not self.stopped and otherwise is not None:
            self._otherwise = otherwise
        self.stopped = True
        self._producer.purge(in_queue=True, in_flight=in_flight, blocking=False)
        self._expect()
        self._stirred.set()
        self._drain()

    def _drain(self) -> None:
        if self.drained.is_set() or not all(call.answered_for for call in self._calls):
            return
        reports = [report for call in self._calls for report in call.errors.values()]
        if self._fatal is not None:
            reports.append(self._fatal)
        verdicts = Verdicts(reports, self._bootstrap, self._otherwise)
        for call in self._calls:
            for index, report in call.errors.items():
                call.failures[index] = verdicts.on(report)
            for index in range(call.unsent, len(call.batch)):
                call.failures[index] = verdicts.others
            for index in call.failures:
                call.hold.stop(call.batch[index].key)
            call.done.set()
        self._calls.clear()
        self.drained.set()
        self.retire()

    async def idle(self) -> None:
        """Returns once no call is on the way."""
        while self._calls:
            self._stirred.clear()
            await self._stirred.wait()

    def retire(self) -> None:
        """Let the producer go. Nothing may be on the way."""
        self.stopped = True
        self.drained.set()
        self._stirred.set()  # ``stop`` did so as well, but reports may have come since
        if self._retired:
            return
        self._retired = True
        self._timer.cancel()
        last, self._producer = [self._producer], None
        # Dropping the last reference closes its connections, and waits for them.
        self._ending = threading.Thread(target=last.clear, name="mailboat-kafka-end", daemon=True)
        self._ending.start()

    @property
    def gone(self) -> bool:
        return self._ending is not None and not self._ending.is_alive()

    def join(self, timeout: float) -> None:
        """Blocks until the producer's threads and connections are gone. Only after :meth:`retire`."""
        if self._ending is not None:
            self._ending.join(timeout)

    # ---- hearing the client out ------------------------------------------------------------------------------------

    def _expect(self) -> None:
        """Answers are due from now on."""
        self._heard_at = self._loop.time()
        if not self._retired and self._timer.when() > self._heard_at + _QUICK:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._heard_at + _QUICK, self._listen)

    def _listen(self) -> None:
        if self._retired:
            return
        now = self._loop.time()
        try:
            if self._producer.poll(0):
                self._heard_at = now
        except KafkaException as error:  # how a fatal error is told
            self._soon(self._end, Report.of(error.args[0], self._topic, -1))
        finally:
            due = self._calls or self._first
            pause = min(max(_QUICK, (now - self._heard_at) * _PATIENCE), _SLOW) if due else _SLOW
            self._timer = self._loop.call_later(pause, self._listen)

    def _soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Not inside of a poll: what follows from a report may purge, or end the producer."""
        self._loop.call_soon(callback, *arguments)

    def _complain(self, error: KafkaError) -> None:
        self.complaint = more_telling(self.complaint, Report.of(error, self._topic, -1))

    def report_failure(self) -> None:
        if not self._failed:
            self._failed = True
            self._soon(self.stop)

    def report_answered(self, call: Call) -> None:
        self._soon(self._settle, call)

    def report_warmth(self, key: str, partition: int) -> None:
        self._cold.discard(partition)
        if not self._cold or len(self._proven) >= _MAX_PROVEN:
            self._proven.clear()
        if self._cold:
            self._proven.add(key)
        self._first.discard(key)
        self._stirred.set()

    def _end(self, fatal: Report) -> None:
        self._fatal = self._fatal or fatal
        self.stop()


def _local_refusal(error: Exception, topic: str) -> EventRefused | None:
    """What librdkafka says about one message before it takes it; None: it is not about the message."""
    if not isinstance(error, KafkaException):
        return EventRefused(f"its key or headers can't be sent: {error}", reason="InvalidText", retryable=False)
    if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return refused(Report.of(error.args[0], topic, -1))
    return None
