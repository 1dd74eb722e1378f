"""One librdkafka producer, from its first message to its first failure, and the sinks that share it.

librdkafka keeps the order of messages in flight only as long as none fails. So a session ends with the first message
that does not arrive, for any reason: all messages still in flight are purged, every call with messages in the session
gets its results, and the next message goes to a new session.

*Sharing.* Each sink that uses a session has a share in it. librdkafka can only purge its whole queue. If one share
fails, calls of the other shares return ``SinkUnavailable``, which costs no attempt, and are sent again in the next
session. ``ProducerShare.at_fault`` marks the share that caused the end; its sink then uses a separate session (see
``cluster``).

*Polling.* librdkafka passes its reports to the caller of ``poll``, one callback per message, and each callback acquires
the GIL separately. A polling thread would compete with the event loop for the GIL twenty thousand times a second. So
the loop polls by a timer, which is fast while reports are due and slow otherwise. The reaction to a report runs outside
``poll`` (``call_soon``), since it may purge or end the producer. Everything here runs on the event loop; only the
destruction of a producer, which may block, runs in a thread.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from mailboat.errors import DeliveryError, SinkUnavailable, Undecided
from mailboat.sinks.daemon_thread import in_a_thread
from mailboat.sinks.kafka.kafka_errors import EpochResults, Report, is_about_a_topic, more_specific
from mailboat.sinks.kafka.producer_share import ProducerShare, ProvenPartitions, PublishCall

_QUICK: Final = 0.0005
"""Seconds between polls while reports are due. The loop rounds them up to its next millisecond."""
_POLL_FRACTION: Final = 0.1
"""Poll interval as a fraction of the time since the last report: a slow broker is not polled 1,000 times a second."""
_SLOW: Final = 0.2
"""Longest poll interval while reports are due, in seconds."""
_IDLE: Final = 2.0
"""Seconds between polls without a call. Only log messages and connection errors of the client are due then."""
_UNLIMITED: Final = 2**31
_MAX_AGE: Final = 6 * 3600.0
"""Brokers expire a producer that was idle for a day, and with it the sequence numbers that order depends on."""
_NOISE: Final = (
    "enable.gapless.guarantee is experimental",  # known, and tested
    "FAIL [",  # logged per connection attempt of every client; the sink reports the cause once
    "unable to satisfy gap-less guarantee",  # a session ends this way if a message is refused; the result says so
    "not found in cache",  # a partition without a leader, logged once per partition and refresh
)
"""Log messages of librdkafka that are dropped."""

logger = logging.getLogger(__name__)
logger.addFilter(lambda record: not any(noise in record.getMessage() for noise in _NOISE))


class ProducerEpoch:
    """Accepts calls until the first failure. Then it is ``stopped``, and ``drained`` once every call has a result."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self.settings = settings
        self.stopped = False
        self.failed = False
        """A message did not arrive: stop handing over messages."""
        self.drained = asyncio.Event()
        self.client_error: Report | None = None
        """Connection error that the client reported since the last successful call."""
        self.bytes = 0
        """Payload bytes of the calls in flight, of all shares."""
        self._bootstrap: str = settings["bootstrap.servers"]
        self.max_messages = int(settings["queue.buffering.max.messages"]) or _UNLIMITED
        self.max_bytes = int(settings["queue.buffering.max.kbytes"]) * 1024
        self.calls: set[PublishCall] = set()
        self.shares: set[ProducerShare] = set()
        self._topics: dict[str, ProvenPartitions] = {}
        self._fatal: Report | None = None
        self.reason: DeliveryError | None = None
        """Result for messages of any share that no report explains."""
        self._changed = asyncio.Event()
        self._superseded = False
        self.producer: Any = Producer({**settings, "logger": logger, "error_cb": self._on_error})
        """None once it is retired."""
        self.closing: asyncio.Future[None] | None = None
        """Done once the threads and connections of a retired producer are gone."""
        self._reported_at = self._started_at
        self._timer = self._loop.call_later(_SLOW, self._poll)

    def new_share(self, topic: str) -> ProducerShare:
        share = ProducerShare(self, topic, self._topics.setdefault(topic, ProvenPartitions()))
        self.shares.add(share)
        return share

    def leave(self, share: ProducerShare) -> None:
        """Remove a share without calls in flight. If it was the last one, retire the producer."""
        self.shares.discard(share)
        if not self.shares and not self.stopped:
            self.retire()

    @property
    def takes_calls(self) -> bool:
        return not self.stopped and self._loop.time() - self._started_at < _MAX_AGE

    def settle(self, call: PublishCall) -> None:
        """Handle a call whose reports have all arrived. Success is returned at once, failures after all reports."""
        if call not in self.calls:
            return
        if not call.errors and call.unsent == len(call.batch):
            self.client_error = None
            call.share.answered_at = self._loop.time()
            self.finish(call)
        if self.stopped:
            self._drain()

    def finish(self, call: PublishCall) -> None:
        """Return a call's result without ending the session."""
        share = call.share
        share.calls.discard(call)
        self.calls.discard(call)
        share.bytes -= call.bytes
        self.bytes -= call.bytes
        call.done.set()
        self.notify()
        if self._superseded and not self.calls:
            self.retire()

    def supersede(self) -> None:
        """Retire after the last call in flight. New calls go to another session."""
        self._superseded = True
        if not self.calls and not self.stopped:
            self.retire()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def stop(self, *, in_flight: bool = True) -> None:
        """Stop sending. Each call gets its results once librdkafka has reported on all its messages."""
        if self.producer is None:
            return
        self.stopped = True
        self.producer.purge(in_queue=True, in_flight=in_flight, blocking=False)
        self.expect()
        self.notify()
        self._drain()

    def _drain(self) -> None:
        if self.drained.is_set() or not all(call.all_answered for call in self.calls):
            return
        results = EpochResults(
            [report for share in self.shares for report in share.reports()], self._fatal, self._bootstrap
        )
        for share in self.shares:
            share.at_fault = share.at_fault or is_about_a_topic(share.reports())
        otherwise = self.reason or self._otherwise(results)
        for share in self.shares:
            default = results.default_error(share.reports(), share.reason or otherwise)
            for call in share.calls:
                for index, report in call.errors.items():
                    call.failures[index] = results.error_for(report, default)
                for index in range(call.unsent, len(call.batch)):
                    call.failures[index] = default
                for index in call.failures:
                    call.hold.stop(call.batch[index].key)
                call.done.set()
            share.calls.clear()
        self.calls.clear()
        self.drained.set()
        self.retire()

    def _otherwise(self, results: EpochResults) -> DeliveryError:
        """Return the result for shares without an error report and without a reason from their sink."""
        if results.common or any(share.at_fault or share.reason for share in self.shares):
            return SinkUnavailable(
                f"the producer for Kafka at {self._bootstrap} was replaced because another subscription that shares it "
                "failed or was stopped; the message is sent again"
            )
        # No message is known to be at fault. Separate sessions, then batches of one, will identify it.
        for share in self.shares:
            share.at_fault = bool(share.calls)
        return Undecided("the producer was stopped")

    def retire(self) -> None:
        """Release the producer. No message may be in flight."""
        self.stopped = True
        self.drained.set()
        self.notify()  # ``stop`` did so as well, but reports may have arrived since
        if self.producer is None:
            return
        self._timer.cancel()
        last, self.producer = [self.producer], None
        # Dropping the last reference closes the connections and blocks until they are closed.
        self.closing = in_a_thread(last.clear, "kafka-end")

    # ---- polling ---------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Poll fast from now on, since reports are due."""
        self._reported_at = self._loop.time()
        if self.producer is not None and self._timer.when() > self._reported_at + _QUICK:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._reported_at + _QUICK, self._poll)

    def _poll(self) -> None:
        if self.producer is None:
            return
        now = self._loop.time()
        try:
            if self.producer.poll(0):
                self._reported_at = now
        except KafkaException as error:  # ``poll`` raises fatal errors
            self._fatal = self._fatal or Report.of(error.args[0], "", -1)
            self._loop.call_soon(self.stop)
        finally:
            pause = min(max(_QUICK, (now - self._reported_at) * _POLL_FRACTION), _SLOW) if self.calls else _IDLE
            self._timer = self._loop.call_later(pause, self._poll)

    def _on_error(self, error: KafkaError) -> None:
        self.client_error = more_specific(self.client_error, Report.of(error, "", -1))

    def notify(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        """Wait until a call is finished, a first message is accepted, or the session ends."""
        self._changed.clear()
        await self._changed.wait()
