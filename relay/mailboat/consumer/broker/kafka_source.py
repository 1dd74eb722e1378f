"""The Kafka source: one thread that owns the client, and the bookkeeping of offsets.

The client belongs to one thread, since calls of other threads would wait behind its blocking ones. The thread polls,
hands decoded records to the event loop without waiting for it, bounds the run-ahead, and commits. So a blocked event
loop or a long handler never costs the group membership.

Commits: the position of a partition is one past the last message before which all are settled. It is committed every
second or 1,000 messages, and when the partition is revoked. Messages that are settled beyond it are delivered again
after a crash, and skipped by the claim store.

Run-ahead: 1,000 messages or 16 MiB per partition beyond the position. If the bound is reached, the thread waits a
moment for the event loop; if the position does not move, because a key is parked or a handler is slow, the partition is
paused, and resumed at half of the bound.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from mailboat.consumer.broker.interfaces import (
    BrokerPoint,
    Decode,
    Original,
    PassingPoint,
    Receiver,
    Record,
    SourceState,
    ignore_point,
)
from mailboat.consumer.broker.kafka_access import KafkaAccess
from mailboat.consumer.broker.kafka_client import client_log
from mailboat.consumer.broker.kafka_offsets import Entry, Partition
from mailboat.sinks.daemon_thread import in_a_thread

log = logging.getLogger(__name__)

_BATCH: Final = 500
_POLL: Final = 0.05
_GRACE: Final = 0.1
"""Seconds that a partition at its bound gets to make progress before it is paused: to pause drops the prefetch."""
_COMMIT_EVERY: Final = 1.0
_COMMIT_AFTER: Final = 1_000
_LAG_EVERY: Final = 1.0
_REQUEST: Final = 5.0
"""Timeout of requests that the thread waits for."""


class KafkaSource:
    """Reads one topic as a member of a consumer group. Implements ``Source``."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        topic: str,
        decode: Decode,
        *,
        consumer: str,
        max_ahead: int = 1_000,
        max_bytes_ahead: int = 16 * 1024 * 1024,
        drain_within: float = 20.0,
        passing: PassingPoint = ignore_point,
    ) -> None:
        """``settings``: from ``consumer_settings``. ``consumer``: ``namespace/name`` of the subscription."""
        self._settings = settings
        self._topic = topic
        self._decode = decode
        self._consumer = consumer
        self._max_ahead = max_ahead
        self._max_bytes = max_bytes_ahead
        self._drain_within = drain_within
        self._passing = passing
        self._partitions: dict[int, Partition] = {}
        self._access = KafkaAccess(settings.get("bootstrap.servers", ""), topic, settings["group.id"], consumer)
        self._stopping = threading.Event()
        self._moved = threading.Event()
        """Set by the event loop when a partition falls to half of its bound, while the thread waits for that."""
        self._throttled = False
        self._connected = False
        self._thread: asyncio.Future[None] | None = None
        self._committed_at = 0.0
        self._lag_at = 0.0

    # -- the engine's side: event loop -------------------------------------------------------------------------------

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._thread = in_a_thread(self._run, "kafka-source")

    def settle(self, record: Record) -> None:
        entry: Entry = record.handle
        progress = entry.progress
        progress.settle(entry)
        if self._throttled and progress.ahead <= self._max_ahead // 2:
            self._moved.set()

    def release(self, record: Record) -> None:
        """Nothing to do: the group's next owner of the partition receives the message again."""

    def state(self) -> SourceState:
        return SourceState(
            connected=self._connected and self._access.error is None,
            error=self._access.error,
            partitions={number: each.state() for number, each in sorted(self._partitions.items())},
        )

    async def stop(self) -> None:
        self._stopping.set()
        self._moved.set()
        if self._thread is not None:
            await self._thread

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run clients until stopped. A client that can't continue is replaced."""
        while not self._stopping.is_set():
            try:
                client = Consumer({**self._settings, "logger": client_log, "error_cb": self._access.on_error,
                                   "on_commit": self._on_commit})  # fmt: skip
            except (KafkaException, RuntimeError) as error:  # out of threads, memory or file descriptors
                self._stopping.wait(self._access.failed(f"no Kafka client can be made: {error}"))
                continue
            try:
                client.subscribe([self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
                while not self._stopping.is_set():
                    self._cycle(client)
                self._release(client, list(self._partitions.values()))
            except KafkaException as error:
                self._access.fail(error.args[0])
                self._abandon(self._partitions.values())
                self._stopping.wait(self._access.failed(self._access.error or str(error)))
            except Exception:
                log.exception("Kafka source failed, reconnects", extra={"consumer": self._consumer})
                self._abandon(self._partitions.values())
                self._stopping.wait(self._access.failed("internal error, see the log"))
            finally:
                self._connected = False
                try:
                    client.close()
                except (KafkaException, RuntimeError) as error:
                    log.debug("Kafka client closed with an error: %s", error)

    def _cycle(self, client: Consumer) -> None:
        # poll() returns at the first message, consume() would wait for a whole batch.
        first = client.poll(_POLL)
        if first is not None:
            self._receive([first, *client.consume(_BATCH - 1, 0)])
        self._access.check(client)
        now = time.monotonic()
        self._bound(client)
        self._commit(client, now)
        if now >= self._lag_at:
            self._lag_at = now + _LAG_EVERY
            self._measure_lag(client)

    def _receive(self, messages: Iterable[Message]) -> None:
        records: list[Record] = []
        partitions, decode, topic = self._partitions, self._decode, self._topic
        fetched = False
        last_stamp: tuple[int, int] | None = None
        timestamp: datetime | None = None
        for message in messages:
            if (error := message.error()) is not None:
                self._access.fail(error)
                continue
            number, offset = message.partition(), message.offset()
            assert number is not None, "only errors have none"
            assert offset is not None, "only errors have none"
            partition = partitions.get(number)
            if partition is None:  # revoked while the client handed it out
                continue
            fetched = True
            key, value = message.key(), message.value()
            progress = partition.progress
            if progress.last is not None and offset <= progress.last:
                partition, records = self._reset(partition, offset, records)
                progress = partition.progress
            stamp = message.timestamp()
            if stamp != last_stamp:  # messages of one batch of a producer often have the same
                last_stamp = stamp
                timestamp = datetime.fromtimestamp(stamp[1] / 1000, UTC) if stamp[0] else None
            original = Original(
                topic=topic,
                partition=number,
                offset=offset,
                timestamp=timestamp,
                key=key,
                value=value,
                headers=_headers(message.headers()),
            )
            record = decode(original)
            record.handle = progress.receive(offset, len(value or b"") + len(key or b""), timestamp)
            records.append(record)
        if fetched:
            self._access.succeeded()
        self._deliver(records)

    def _deliver(self, records: list[Record]) -> None:
        if records:
            self._in_loop(self._receiver.take, records)

    def _reset(self, partition: Partition, offset: int, records: list[Record]) -> tuple[Partition, list[Record]]:
        """The broker delivers earlier offsets again: the topic was truncated or created again. Start there."""
        log.warning(
            "Offsets of a partition went back",
            extra={"consumer": self._consumer, "partition": partition.number, "to": offset},
        )
        self._deliver(records)
        self._in_loop(self._receiver.lose, [partition.number])
        self._abandon([partition])
        restarted = self._partitions[partition.number] = Partition(partition.number)
        return restarted, []

    def _bound(self, client: Consumer) -> None:
        """Pause partitions at their bound, resume those at half of it."""
        full = [each for each in self._partitions.values() if not each.paused and self._is_full(each)]
        if full:
            self._moved.clear()
            self._throttled = True
            if any(self._is_full(each) for each in full):
                self._moved.wait(_GRACE)
            self._throttled = False
            full = [each for each in full if self._is_full(each) and not each.closed]
        if full:
            client.pause([TopicPartition(self._topic, each.number) for each in full])
            for each in full:
                each.paused = True
                log.info("Partition paused", extra={"consumer": self._consumer, "partition": each.number})
        for each in [each for each in self._partitions.values() if each.paused and self._is_half_empty(each)]:
            client.resume([TopicPartition(self._topic, each.number)])
            each.paused = False
            log.info("Partition resumed", extra={"consumer": self._consumer, "partition": each.number})

    def _is_full(self, partition: Partition) -> bool:
        progress = partition.progress
        return progress.ahead >= self._max_ahead or progress.bytes_ahead >= self._max_bytes

    def _is_half_empty(self, partition: Partition) -> bool:
        progress = partition.progress
        return progress.ahead <= self._max_ahead // 2 and progress.bytes_ahead <= self._max_bytes // 2

    # -- commits -----------------------------------------------------------------------------------------------------

    def _commit(self, client: Consumer, now: float) -> None:
        """Commit every second or 1,000 messages, without waiting for the broker."""
        moved = [each for each in self._partitions.values() if each.is_ahead]
        if not moved:
            self._committed_at = now
        elif now >= self._committed_at + _COMMIT_EVERY or sum(each.unsent for each in moved) >= _COMMIT_AFTER:
            self._committed_at = now
            client.commit(offsets=self._positions(moved), asynchronous=True)

    def _positions(self, partitions: Iterable[Partition]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, each.number, each.position_to_commit()) for each in partitions]

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        if error is None:
            self._committed(offsets)
        elif error.code() != KafkaError._NO_OFFSET:
            log.debug("Commit failed, it is repeated: %s", error, extra={"consumer": self._consumer})
            for each in self._partitions.values():
                each.requested = each.committed

    def _committed(self, offsets: list[TopicPartition]) -> None:
        for each in offsets:
            partition = self._partitions.get(each.partition)
            if partition is None:
                continue
            if each.error is None:
                partition.committed = max(each.offset, partition.committed or 0)
            else:
                partition.requested = partition.committed
        self._passing(BrokerPoint.COMMITTED)

    # -- assignment --------------------------------------------------------------------------------------------------

    def _assigned(self, client: Consumer, assigned: list[TopicPartition]) -> None:
        self._connected = True
        self._access.succeeded()
        for each in assigned:
            self._partitions[each.partition] = Partition(each.partition)
        if assigned:
            numbers = sorted(each.partition for each in assigned)
            log.info("Partitions assigned", extra={"consumer": self._consumer, "partitions": numbers})
            self._learn_committed(client, assigned)

    def _learn_committed(self, client: Consumer, assigned: list[TopicPartition]) -> None:
        try:
            committed = client.committed([TopicPartition(self._topic, each.partition) for each in assigned], _REQUEST)
        except KafkaException:
            return  # only the lag is unknown until the first commit
        for each in committed:
            if each.offset >= 0:
                self._partitions[each.partition].committed = each.offset

    def _revoked(self, client: Consumer, revoked: list[TopicPartition]) -> None:
        self._release(
            client, [self._partitions[each.partition] for each in revoked if each.partition in self._partitions]
        )

    def _release(self, client: Consumer, partitions: list[Partition]) -> None:
        """Drain and commit."""
        if not partitions:
            return
        numbers = [each.number for each in partitions]
        draining = asyncio.run_coroutine_threadsafe(self._drain(numbers), self._loop)
        self._wait_for(draining)
        moved = [each for each in partitions if each.is_ahead]
        for each in partitions:
            each.closed = True
        try:
            if moved:
                self._committed(client.commit(offsets=self._positions(moved), asynchronous=False))
        except KafkaException as error:  # the messages are delivered again
            log.warning("Commit failed: %s", error.args[0].str(), extra={"consumer": self._consumer})
        for number in numbers:
            self._partitions.pop(number, None)
        log.info("Partitions released", extra={"consumer": self._consumer, "partitions": sorted(numbers)})

    async def _drain(self, numbers: list[int]) -> None:
        await self._receiver.revoke(numbers, self._drain_within)

    def _wait_for(self, draining: Future[None]) -> None:
        """Wait for the event loop, which a handler may block."""
        try:
            draining.result(self._drain_within + _REQUEST)
        except TimeoutError:
            log.warning("Partitions released while the event loop was blocked", extra={"consumer": self._consumer})

    def _lost(self, client: Consumer, lost: list[TopicPartition]) -> None:
        self._abandon([self._partitions[each.partition] for each in lost if each.partition in self._partitions])

    def _abandon(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions without a commit: another consumer may have them."""
        abandoned = list(partitions)
        for each in abandoned:
            each.closed = True
            self._partitions.pop(each.number, None)
        if abandoned:
            numbers = [each.number for each in abandoned]
            log.warning("Partitions lost", extra={"consumer": self._consumer, "partitions": sorted(numbers)})
            self._in_loop(self._receiver.lose, numbers)

    # -- lag -----------------------------------------------------------------------------------------------------------

    def _measure_lag(self, client: Consumer) -> None:
        """End offset minus committed offset, from what the client has cached."""
        for each in self._partitions.values():
            try:
                low, high = client.get_watermark_offsets(TopicPartition(self._topic, each.number), cached=True)
            except KafkaException:
                continue
            if high >= 0:
                each.lag = max(0, high - (max(low, 0) if each.committed is None else each.committed))

    def _in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


def _headers(found: Any) -> tuple[tuple[str, bytes], ...]:
    """Return the headers of a message. Kafka allows null values, which are rare: they become empty."""
    if not found:
        return ()
    for _, value in found:
        if value is None:
            return tuple((name, value or b"") for name, value in found)
    return tuple(found)
