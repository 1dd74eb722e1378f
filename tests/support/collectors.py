"""Consumers that collect all messages of a Kafka topic or of an ordered Pub/Sub subscription, on a thread each."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

import grpc
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition
from google.pubsub_v1 import PublisherClient, SubscriberClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from support.background import BackgroundThread
from support.ledger import Arrival, sequence_of
from support.wait import wait_until


class Collector(BackgroundThread):
    """Collector that reads during its ``with`` block. Subclasses implement the source."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.arrivals: list[Arrival] = []
        self.ids: dict[str, float] = {}
        """Time of the first arrival, by event id."""

    def until_all(self, expected: Collection[str], timeout: float = 60.0) -> None:
        """Wait until all of these events have arrived. Fail if none arrives for ``timeout`` seconds."""
        missing = set(expected)
        progress = time.monotonic()
        while missing:
            self.raise_failure()
            left = {event_id for event_id in missing if event_id not in self.ids}
            if len(left) < len(missing):
                missing, progress = left, time.monotonic()
            elif time.monotonic() - progress > timeout:
                raise AssertionError(
                    f"{len(left)} of {len(expected)} events did not arrive at {self.name},"
                    f" and none arrived for {timeout:g} s: {sorted(left)[:5]}"
                )
            self._ending.wait(0.02)

    def until(self, event_id: str, timeout: float = 30.0) -> float:
        """Wait for the event and return the time of its arrival, in monotonic seconds."""
        self.until_all([event_id], timeout)
        return self.ids[event_id]

    def until_quiet(self, seconds: float = 1.0, timeout: float = 30.0) -> None:
        """Wait until no message has arrived for a while, since duplicates may follow the last event."""
        wait_until(
            lambda: not self.arrivals or time.monotonic() - self.arrivals[-1].at > seconds,
            timeout,
            f"{self.name} to become quiet",
        )

    def _take(self, key: str | None, payload: bytes | None, headers: Mapping[str, str]) -> None:
        now = time.monotonic()
        event_id = headers.get("ce_id") or headers.get("ce-id") or headers["event_id"]
        arrival = Arrival(event_id, key, payload, *sequence_of(headers), now)
        self.arrivals.append(arrival)
        self.ids.setdefault(arrival.event_id, now)


class KafkaCollector(Collector):
    """Collector that reads all partitions of a topic from the beginning."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(f"Kafka topic {topic}")
        self._bootstrap = bootstrap
        self.topic = topic

    def work(self) -> None:
        settings = {"bootstrap.servers": self._bootstrap, "group.id": "collector", "enable.auto.commit": False}
        consumer = Consumer({**settings, "fetch.wait.max.ms": 20, "log_level": 0})
        try:
            partitions = consumer.list_topics(self.topic, timeout=20).topics[self.topic].partitions
            consumer.assign([TopicPartition(self.topic, number, OFFSET_BEGINNING) for number in partitions])
            while not self._ending.is_set():
                self._take_all(consumer.consume(500, timeout=0.05))
        finally:
            consumer.close()

    def _take_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.error():  # the broker is unavailable; librdkafka reconnects
                continue
            key = message.key()
            headers = {name: _text(value) for name, value in dict(message.headers() or []).items()}
            self._take(None if key is None else key.decode(), message.value(), headers)


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


class PubSubCollector(Collector):
    """Collector that creates the topic and an ordered subscription to it, and pulls."""

    def __init__(self, host: str, topic: str, project: str = "faults") -> None:
        super().__init__(f"Pub/Sub topic {topic}")
        self._channel = grpc.insecure_channel(host)
        self._subscriber = SubscriberClient(transport=SubscriberGrpcTransport(channel=self._channel))
        self._subscription = f"projects/{project}/subscriptions/{topic}"
        path = f"projects/{project}/topics/{topic}"
        PublisherClient(transport=PublisherGrpcTransport(channel=self._channel)).create_topic(name=path)
        self._subscriber.create_subscription(
            request={
                "name": self._subscription,
                "topic": path,
                "enable_message_ordering": True,
                "ack_deadline_seconds": 60,
            }
        )

    def work(self) -> None:
        try:
            while not self._ending.is_set():
                pulled = self._subscriber.pull(subscription=self._subscription, max_messages=1000, timeout=60)
                received = pulled.received_messages
                for each in received:
                    message = each.message
                    self._take(message.ordering_key or None, message.data, dict(message.attributes))
                if received:
                    ids = [each.ack_id for each in received]
                    self._subscriber.acknowledge(subscription=self._subscription, ack_ids=ids, timeout=60)
                else:
                    self._ending.wait(0.02)
        finally:
            self._channel.close()
