"""One librdkafka producer, from its first message to its first failure, and the sinks that share it.

librdkafka keeps order among what is in flight, but only as long as nothing fails. So a session ends with the first
message that does not arrive, for whatever reason: everything that is still on the way is purged, every call that has
messages in it gets its answer, and the next message goes to a new session.

*Sharing.* Each sink that uses a session has a lane in it. librdkafka can purge only everything: if one lane fails, the
calls of the others are answered ``SinkUnavailable``, which costs no attempt, and are sent again in the next session.
``Lane.at_fault`` says which lane caused the end; its sink then leaves the others alone (see ``cluster``).

*Polling.* librdkafka delivers its reports to the caller of ``poll``, one callback per message, and each takes the
interpreter's lock for itself. A thread that polls would compete with the event loop for that lock twenty thousand
times a second; so the loop polls, by a timer that is quick while answers are due and slow otherwise. Everything here
runs on the event loop; only the end of a producer, which may block, has a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from mailboat.errors import DeliveryError, SinkUnavailable, Undecided
from mailboat.sinks.kafka.errors import Report, Verdicts, is_about_a_topic, more_telling
from mailboat.sinks.kafka.lane import Call, Lane
from mailboat.sinks.kafka.warmth import Warmth

_QUICK: Final = 0.0005  # seconds between polls while answers are due; the loop rounds it up to its next millisecond
_SLOW: Final = 0.2  # while none are: the client may have something to complain about
_PATIENCE: Final = 0.1  # of the time that answers have been due: a slow broker is not asked a thousand times a second
_UNLIMITED: Final = 2**31
_MAX_AGE: Final = 6 * 3600.0
"""Brokers forget a producer that is silent for a day, and with it the sequence numbers that order rests on."""


class Session:
    """Takes calls until the first failure: then it is ``stopped``, and ``drained`` once every call has its answer."""

    def __init__(self, settings: Mapping[str, Any], *, logger: logging.Logger) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self.settings = settings
        self.stopped = False
        self.failed = False
        """Something did not arrive: hand over no more."""
        self.drained = asyncio.Event()
        self.complaint: Report | None = None
        """What the client said about its connections since a call last went well."""
        self.bytes = 0
        """Payload of the calls on the way, of all lanes."""
        self._bootstrap: str = settings["bootstrap.servers"]
        self._max_messages = int(settings["queue.buffering.max.messages"]) or _UNLIMITED
        self._max_bytes = int(settings["queue.buffering.max.kbytes"]) * 1024
        self.calls: set[Call] = set()
        self._lanes: set[Lane] = set()
        self._topics: dict[str, Warmth] = {}
        self._fatal: Report | None = None
        self.reason: DeliveryError | None = None
        """The answer for messages of any lane that no report explains."""
        self._stirred = asyncio.Event()
        self._superseded = False
        self._retired = False
        self.producer: Any = Producer({**settings, "logger": logger, "error_cb": self._complain})
        self._ending: threading.Thread | None = None
        self._heard_at = self._started_at
        self._timer = self._loop.call_later(_SLOW, self._listen)

    def lane(self, topic: str) -> Lane:
        """A new user of this session."""
        lane = Lane(self, topic, self._topics.setdefault(topic, Warmth()))
        self._lanes.add(lane)
        return lane

    def leave(self, lane: Lane) -> None:
        """The last user takes the producer along."""
        self._lanes.discard(lane)
        if not self._lanes and not self.stopped:
            self.retire()

    @property
    def takes_calls(self) -> bool:
        return not self.stopped and self._loop.time() - self._started_at < _MAX_AGE

    def answered_others(self, lane: Lane, *, since: float) -> bool:
        return any(other.answered_at > since for other in self._lanes if other is not lane)

    @property
    def queue(self) -> tuple[int, int, int, int]:
        """Messages and bytes on the way, each with its limit."""
        return len(self.producer), self._max_messages, self.bytes, self._max_bytes

    def settle(self, call: Call) -> None:
        """All reports of a call are in. Good news goes out at once, bad news when all of it is known."""
        if call not in self.calls:
            return
        if not call.errors and call.unsent == len(call.batch):
            self.complaint = None
            call.lane.answered_at = self._loop.time()
            self.finish(call)
        if self.stopped:
            self._drain()

    def finish(self, call: Call) -> None:
        """The call has its answer, and the session goes on."""
        lane = call.lane
        lane.calls.discard(call)
        self.calls.discard(call)
        lane.bytes -= call.bytes
        self.bytes -= call.bytes
        call.done.set()
        self.stir()
        if self._superseded and not self.calls:
            self.retire()

    def supersede(self) -> None:
        """Calls go to another session from now on: end with the last call on the way."""
        self._superseded = True
        if not self.calls and not self.stopped:
            self.retire()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def stop(self, *, in_flight: bool = True) -> None:
        """Send nothing more, and answer every call once librdkafka has reported on all of its messages."""
        if self._retired:
            return
        self.stopped = True
        self.producer.purge(in_queue=True, in_flight=in_flight, blocking=False)
        self.expect()
        self.stir()
        self._drain()

    def _drain(self) -> None:
        if self.drained.is_set() or not all(call.answered_for for call in self.calls):
            return
        verdicts = Verdicts([report for lane in self._lanes for report in lane.reports()], self._fatal, self._bootstrap)
        for lane in self._lanes:
            lane.at_fault = lane.at_fault or is_about_a_topic(lane.reports())
        otherwise = self.reason or self._otherwise(verdicts)
        for lane in self._lanes:
            others = verdicts.others(lane.reports(), lane.reason or otherwise)
            for call in lane.calls:
                for index, report in call.errors.items():
                    call.failures[index] = verdicts.on(report, others)
                for index in range(call.unsent, len(call.batch)):
                    call.failures[index] = others
                for index in call.failures:
                    call.hold.stop(call.batch[index].key)
                call.done.set()
            lane.calls.clear()
        self.calls.clear()
        self.drained.set()
        self.retire()

    def _otherwise(self, verdicts: Verdicts) -> DeliveryError:
        """The answer for lanes that neither a report nor their sink explains."""
        if verdicts.common or any(lane.at_fault or lane.reason for lane in self._lanes):
            return SinkUnavailable(
                f"the producer for Kafka at {self._bootstrap} was replaced because another subscription that shares it "
                "failed or was stopped; the message is sent again"
            )
        # No message is known to be at fault. Apart, and then one at a time, it will be found.
        for lane in self._lanes:
            lane.at_fault = bool(lane.calls)
        return Undecided("the producer was stopped")

    def retire(self) -> None:
        """Let the producer go. Nothing may be on the way."""
        self.stopped = True
        self.drained.set()
        self.stir()  # ``stop`` did so as well, but reports may have come since
        if self._retired:
            return
        self._retired = True
        self._timer.cancel()
        last, self.producer = [self.producer], None
        # Dropping the last reference closes its connections, and waits for them.
        self._ending = threading.Thread(target=last.clear, name="mailboat-kafka-end", daemon=True)
        self._ending.start()

    @property
    def gone(self) -> bool:
        return self._ending is not None and not self._ending.is_alive()

    def join(self, timeout: float) -> None:
        """Blocks until the producer's threads and connections are gone, if it is retired."""
        if self._ending is not None:
            self._ending.join(timeout)

    # ---- polling ---------------------------------------------------------------------------------------------------

    def expect(self) -> None:
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
            if self.producer.poll(0):
                self._heard_at = now
        except KafkaException as error:  # how a fatal error is told
            self._soon(self._end, Report.of(error.args[0], "", -1))
        finally:
            pause = min(max(_QUICK, (now - self._heard_at) * _PATIENCE), _SLOW) if self.calls else _SLOW
            self._timer = self._loop.call_later(pause, self._listen)

    def _soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Not inside of a poll: what follows from a report may purge, or end the producer."""
        self._loop.call_soon(callback, *arguments)

    def _complain(self, error: KafkaError) -> None:
        self.complaint = more_telling(self.complaint, Report.of(error, "", -1))

    def report_failure(self) -> None:
        if not self.failed:
            self.failed = True
            self._soon(self.stop)

    def report_answered(self, call: Call) -> None:
        self._soon(self.settle, call)

    def _end(self, fatal: Report) -> None:
        self._fatal = self._fatal or fatal
        self.stop()

    # ---- waiting for something to happen ---------------------------------------------------------------------------

    def stir(self) -> None:
        self._stirred.set()

    async def stirred(self) -> None:
        """Returns when a call was answered, a first message was accepted, or the session ended."""
        self._stirred.clear()
        await self._stirred.wait()
