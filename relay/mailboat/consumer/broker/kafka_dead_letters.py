"""Reads a dead-letter topic on Kafka, for ``mailboat dlq``.

The progress of replays is stored as committed offsets of a consumer group, one per set of filters: a replay that was
interrupted continues, and a replay with other filters is independent. The reader assigns partitions itself and joins no
group.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place

from mailboat.consumer.broker.interfaces import Original
from mailboat.errors import SinkUnavailable
from mailboat.sinks.daemon_thread import in_a_thread
from mailboat.sinks.kafka.cluster import describe_topics
from mailboat.sinks.kafka.kafka_errors import Report, unavailable

_TIMEOUT: Final = 30.0
_POLL: Final = 0.1
_BATCH: Final = 500
_NO_COORDINATOR: Final = frozenset(
    {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS}
)
"""For a moment after the first group of a cluster, and after a broker was lost."""


class KafkaLetters:
    """All messages that a dead-letter topic has when reading begins."""

    def __init__(self, client: Mapping[str, Any], topic: str, group: str, timeout: float = _TIMEOUT) -> None:
        """``client``: settings of librdkafka. ``group`` stores the progress. ``timeout``: seconds per request."""
        self._client = client
        self._timeout = timeout
        self.topic = topic
        self._bootstrap: str = client["bootstrap.servers"]
        self._settings: dict[str, Any] = {
            **client,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "log_level": 0,
        }
        self._consumer: Any = None
        self._partitions = 0

    def __enter__(self) -> Self:
        """Connect. Raises SinkUnavailable if the brokers can't be reached or the topic does not exist."""
        facts = describe_topics(self._client, (self.topic,), timeout=self._timeout)[self.topic]
        if isinstance(facts, SinkUnavailable):
            raise facts
        self._partitions = facts.partitions
        self._consumer = Consumer(self._settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        consumer, self._consumer = self._consumer, None
        consumer.close()

    def committed(self) -> dict[int, int]:
        """Return the offset after the last replayed message, by partition."""
        places = [Place(self.topic, number) for number in range(self._partitions)]
        found = self._coordinated(lambda: self._consumer.committed(places, timeout=self._timeout))
        return {each.partition: each.offset for each in found or () if each.offset >= 0}

    def waiting(self) -> int:
        """Return the number of messages after the progress. Gaps of transactions and compaction are counted, too."""
        replayed, count = self.committed(), 0
        try:
            for number in range(self._partitions):
                low, high = self._consumer.get_watermark_offsets(Place(self.topic, number), timeout=self._timeout)
                count += max(0, high - max(low, replayed.get(number, 0)))
        except KafkaException as error:
            raise self._unavailable(error) from error
        return count

    def read(self, after: Mapping[int, int] | None = None) -> Iterator[Original]:
        """Yield messages, per partition in order, from offsets ``after`` up to the present end."""
        starts = after or {}
        places = [Place(self.topic, number, starts.get(number, OFFSET_BEGINNING)) for number in range(self._partitions)]
        ends: dict[int, int] = {}
        try:
            for place in places:
                low, high = self._consumer.get_watermark_offsets(place, timeout=_TIMEOUT)
                if low < high and starts.get(place.partition, 0) < high:
                    ends[place.partition] = high
            self._consumer.assign([place for place in places if place.partition in ends])
            last_received = monotonic()
            while ends:
                messages = self._consumer.consume(_BATCH, timeout=_POLL)
                if messages:
                    last_received = monotonic()
                elif monotonic() - last_received > _TIMEOUT:
                    raise SinkUnavailable(
                        f"no answer from Kafka at {self._bootstrap} within {_TIMEOUT:g} s while reading topic"
                        f" {self.topic}: are the brokers up?"
                    )
                yield from self._before_end(messages, ends)
        except KafkaException as error:
            raise self._unavailable(error) from error

    def _before_end(self, messages: Iterable[Any], ends: dict[int, int]) -> Iterator[Original]:
        for message in messages:
            partition, error = message.partition(), message.error()
            if error is None and partition in ends and message.offset() < ends[partition]:
                yield original_of(message)
                if message.offset() + 1 >= ends[partition]:
                    del ends[partition]
            elif error is not None and error.code() == KafkaError._PARTITION_EOF:
                ends.pop(partition, None)  # what is before the end was compacted, or belongs to a transaction
            elif error is not None and not error.retriable() and error.code() != KafkaError._TRANSPORT:
                raise KafkaException(error)

    def fetch(self, origin: Original) -> Original | None:
        """Return the message at the topic, partition and offset of ``origin``; None if it is not there any more."""
        consumer = Consumer(self._settings)
        try:
            consumer.assign([Place(origin.topic, origin.partition or 0, int(origin.offset))])
            messages = consumer.consume(1, timeout=_TIMEOUT)
        finally:
            consumer.close()
        found = [original_of(message) for message in messages if message.error() is None]
        return found[0] if found and found[0].offset == origin.offset else None

    def commit(self, replayed: Mapping[int, int]) -> None:
        """Store the progress: by partition, the offset after the last message that needs no replay any more."""
        places = [Place(self.topic, partition, offset) for partition, offset in replayed.items()]
        self._coordinated(lambda: self._consumer.commit(offsets=places, asynchronous=False))

    def _coordinated(self, call: Callable[[], Any]) -> Any:
        """Return the answer of the group's coordinator. Repeats the call while the group has none."""
        deadline = monotonic() + self._timeout
        while True:
            try:
                return call()
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.GROUP_ID_NOT_FOUND:  # no replay has committed yet
                    return None
                if code not in _NO_COORDINATOR or monotonic() > deadline:
                    raise self._unavailable(error) from error
            sleep(_POLL)

    def _unavailable(self, error: KafkaException) -> SinkUnavailable:
        return unavailable(Report.of(error.args[0], self.topic, -1), self._bootstrap)


def original_of(message: Any) -> Original:
    """Return a message of confluent_kafka."""
    kind, milliseconds = message.timestamp()
    return Original(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        timestamp=None if kind == TIMESTAMP_NOT_AVAILABLE else datetime.fromtimestamp(milliseconds / 1000, UTC),
        key=message.key(),
        value=message.value(),
        headers=tuple(message.headers() or ()),
    )


class KafkaPages:
    """Pages of a dead-letter topic, read in threads. See ``replay.Letters``."""

    def __init__(self, letters: KafkaLetters, after: Mapping[int, int]) -> None:
        self._letters = letters
        self._messages = letters.read(after)

    async def next(self, size: int) -> Sequence[Original]:
        return await in_a_thread(lambda: list(islice(self._messages, size)), "dead-letters")

    async def settle(self, read: Sequence[Original], replayed: Collection[Original]) -> None:
        """Commit. Messages that were not selected are passed, too: the group belongs to one set of filters."""
        offsets = {each.partition: int(each.offset) + 1 for each in read if each.partition is not None}
        if offsets:
            await in_a_thread(lambda: self._letters.commit(offsets), "dead-letters")

    async def fetch(self, origin: Original) -> Original | None:
        return await in_a_thread(lambda: self._letters.fetch(origin), "dead-letters")
