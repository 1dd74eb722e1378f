"""Backends of the conformance suite for sinks: create a sink, break its connection, and read the destination.

Each backend lists its ``Features``. A test lists the features that it needs with ``on_backends``.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from google.cloud import pubsub_v1
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport
from google.pubsub_v1.types import PullRequest, PullResponse

from mailboat.model import Message
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.log import LogSink
from mailboat.sinks.protocol import Sink, SinkContext
from mailboat.sinks.pubsub import PubSubSink
from mailboat.testing.memory_sink import MemorySink
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.pubsub import PubSubServer
from support.refusing_pubsub import RefusingPubSub
from support.wait import await_until, wait_until

POISON = b"poison" + b"." * 30_000
"""Value that the destination refuses after ``Backend.refuse_poison``."""
_UNIMPORTANT = "file.delete.delay.ms"
"""Setting of a topic that no test uses."""


Opened = Callable[..., Awaitable[Any]]
"""The fixture ``opened``."""


class Received(NamedTuple):
    key: str | None
    value: bytes | None
    headers: Mapping[str, str]
    partition: int | None = None


@dataclass(frozen=True)
class Features:
    refuses_at_the_destination: bool = True
    has_topics: bool = True
    can_be_killed: bool = True
    keeps_null_values: bool = True
    too_large: int = 12_000_000
    """Size in bytes of a value that ``refusal`` must refuse; 0 means no limit."""


def context(timeout: float = 60.0, secrets_: Mapping[str, str] | None = None) -> SinkContext:
    return SinkContext(subscription="shop/orders", delivery_timeout=timeout, secrets=secrets_ or {})


class Backend(abc.ABC):
    """One new, empty destination."""

    features = Features()

    @abc.abstractmethod
    def sink(self, *, timeout: float = 60.0, topic: str | None = None, config: Mapping[str, str] | None = None) -> Sink:
        """Return a closed sink. ``config`` applies to Kafka only."""

    @abc.abstractmethod
    async def received(self) -> list[Received]:
        """Return all arrived messages, those of a key in the order of arrival."""

    def refuse_poison(self) -> None:
        """Let the destination refuse messages with the value POISON. Call this after ``open``."""
        raise NotImplementedError

    def go_away(self) -> None:
        """Refuse connections and close open ones."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Keep connections open and do not answer."""
        raise NotImplementedError

    def come_back(self) -> None:
        """Undo ``go_away`` or ``freeze``."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Release resources at the end of the test."""

    async def receive(self, count: int) -> list[Received]:
        """Wait for at least ``count`` messages."""

        async def enough() -> list[Received]:
            received = await self.received()
            return received if len(received) >= count else []

        return await await_until(enough, timeout=60, what=f"{count} messages") if count else await self.received()


class KafkaBackend(Backend):
    features = Features(too_large=1_100_000)

    def __init__(self, server: KafkaServer, partitions: int = 4, topic: str | None = None) -> None:
        """``topic``: an existing topic; by default the backend creates one."""
        self.server = server
        self.topic = topic or f"topic-{secrets.token_hex(4)}"
        self._partitions = partitions
        self._broken: Callable[[], None] | None = None
        if topic is None:
            server.create_topic(self.topic, partitions)

    def sink(
        self,
        *,
        timeout: float = 60.0,
        topic: str | None = None,
        config: Mapping[str, str] | None = None,
        secrets_: Mapping[str, str] | None = None,
    ) -> KafkaSink:
        model = SimpleNamespace(
            bootstrap_servers=(self.server.bootstrap,),
            topic=topic or self.topic,
            config=config or {},
            config_secret_ref=None,
        )
        return KafkaSink.build(model, context(timeout, secrets_))

    async def received(self) -> list[Received]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Received]:
        settings: dict[str, Any] = {
            "bootstrap.servers": self.server.bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        consumer = Consumer(settings)
        try:
            places = [TopicPartition(self.topic, partition, 0) for partition in range(self._partitions)]
            awaited = {place.partition: high for place in places if (high := _high_watermark(consumer, place))}
            consumer.assign(places)
            received = []
            while awaited:
                message = consumer.poll(60)
                assert message is not None, f"{self.topic} should hold messages up to {awaited}"
                assert message.error() is None, message.error()
                received.append(_from_kafka(message))
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                if offset + 1 >= awaited.get(partition, 0):
                    awaited.pop(partition, None)
            return received
        finally:
            consumer.close()

    def refuse_poison(self) -> None:
        self.configure("max.message.bytes", "20000")

    def configure(self, name: str, value: str) -> None:
        """Change a setting of the topic and return after it is effective."""
        admin = AdminClient({"bootstrap.servers": self.server.bootstrap, "log_level": 0})
        self._set(admin, name, value)
        # Apache Kafka reports a change before the change is effective, and completes it before it reports the next one.
        # The report of a second change therefore proves the first. kfake does both at once, and has no such setting.
        if unimportant := self._settings(admin).get(_UNIMPORTANT):
            self._set(admin, _UNIMPORTANT, str(int(unimportant) + 1))

    def _set(self, admin: AdminClient, name: str, value: str) -> None:
        """Change a setting and return after the broker reports it."""
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(60)
        wait_until(lambda: self._settings(admin)[name] == value, what=f"{name} of {self.topic} to be {value}")

    def _settings(self, admin: AdminClient) -> dict[str, str | None]:
        resource = ConfigResource(ResourceType.TOPIC, self.topic)
        return {name: entry.value for name, entry in admin.describe_configs([resource])[resource].result(60).items()}

    def delete_topic(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.bootstrap, "log_level": 0})
        admin.delete_topics([self.topic])[self.topic].result(60)

    def go_away(self) -> None:
        self.server.kill()
        self._broken = self.server.restart

    def freeze(self) -> None:
        self.server.suspend()
        self._broken = self.server.resume

    def come_back(self) -> None:
        if self._broken is not None:
            restore, self._broken = self._broken, None
            restore()

    def close(self) -> None:
        self.come_back()


def _high_watermark(consumer: Consumer, place: TopicPartition) -> int:
    """Return the high watermark. Retry while the partition has no leader, for example after a lost broker session."""

    def high_watermark() -> list[int]:
        try:
            return [consumer.get_watermark_offsets(place, timeout=60)[1]]
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE):
                return []
            raise

    (high,) = wait_until(high_watermark, what=f"a leader of {place}")
    return high


def _from_kafka(message: Any) -> Received:
    key = message.key()
    headers = {name: value.decode() for name, value in message.headers() or []}
    return Received(None if key is None else key.decode(), message.value(), headers, message.partition())


class SharedKafkaBackend(KafkaBackend):
    """Backend on the shared broker, which a test must not kill."""

    features = replace(KafkaBackend.features, can_be_killed=False)


class PubSubBackend(Backend):
    features = Features(keeps_null_values=False)

    def __init__(self, server: PubSubServer, **subscription: Any) -> None:
        """``subscription``: settings of the subscription that ``received`` reads."""
        self._server = server
        self.topic = f"topic-{secrets.token_hex(4)}"
        self._path = f"projects/acme/topics/{self.topic}"
        self._subscription = f"projects/acme/subscriptions/{self.topic}"
        self._refusing = RefusingPubSub(server.host)
        self._proxy = Proxy("127.0.0.1", self._refusing.port)
        self._channel = grpc.insecure_channel(server.host, options=[("grpc.max_receive_message_length", -1)])
        self._subscriber = pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=self._channel))
        self._pull = self._channel.unary_unary(
            "/google.pubsub.v1.Subscriber/Pull", PullRequest.serialize, PullResponse.deserialize
        )
        publisher = pubsub_v1.PublisherClient(transport=PublisherGrpcTransport(channel=self._channel))
        publisher.create_topic(name=self._path)
        self._subscriber.create_subscription({"name": self._subscription, "topic": self._path, **subscription})
        self._received: dict[int, Received] = {}

    def sink(
        self, *, timeout: float = 60.0, topic: str | None = None, config: Mapping[str, str] | None = None
    ) -> PubSubSink:
        model = SimpleNamespace(
            project="acme", topic=topic or self.topic, endpoint=self._proxy.address, credentials_secret_ref=None
        )
        return PubSubSink.build(model, context(timeout))

    async def received(self) -> list[Received]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Received]:
        while True:
            # The client library would warn about return_immediately.
            request = PullRequest(subscription=self._subscription, max_messages=1000, return_immediately=True)
            found = self._pull(request, timeout=60).received_messages
            if not found:
                return [self._received[number] for number in sorted(self._received)]
            for item in found:
                message = item.message
                number = int(message.message_id.removeprefix("m"))  # the fake numbers messages by arrival
                self._received[number] = Received(
                    message.ordering_key or None, bytes(message.data), dict(message.attributes)
                )
            self._subscriber.acknowledge(subscription=self._subscription, ack_ids=[item.ack_id for item in found])

    @property
    def published(self) -> list[int]:
        """Number of messages in each publish request."""
        return self._refusing.published

    def refuse_poison(self, answer: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        self._refusing.poison, self._refusing.answer = POISON, answer

    def go_away(self) -> None:
        self._proxy.stop()

    def freeze(self) -> None:
        self._proxy.deafen()

    def come_back(self) -> None:
        self._proxy.start()
        self._proxy.undeafen()

    def close(self) -> None:
        self._proxy.close()
        self._refusing.close()
        self._channel.close()


class LogBackend(Backend):
    features = Features(refuses_at_the_destination=False, has_topics=False, can_be_killed=False, too_large=0)

    def __init__(self, path: Path) -> None:
        self._path = path

    def sink(
        self, *, timeout: float = 60.0, topic: str | None = None, config: Mapping[str, str] | None = None
    ) -> LogSink:
        return LogSink.build(SimpleNamespace(path=str(self._path)), context(timeout))

    async def received(self) -> list[Received]:
        return [_from_line(json.loads(line)) for line in self._path.read_text().splitlines()]


def _from_line(record: dict[str, Any]) -> Received:
    if "value_base64" in record:
        value: bytes | None = base64.b64decode(record["value_base64"])
    else:
        value = None if record["value"] is None else record["value"].encode()
    return Received(record["key"], value, record["headers"])


class MemoryBackend(Backend):
    features = Features(has_topics=False, too_large=1_000_001)

    def __init__(self) -> None:
        self._sinks: list[MemorySink] = []

    def sink(
        self, *, timeout: float = 60.0, topic: str | None = None, config: Mapping[str, str] | None = None
    ) -> MemorySink:
        sink = MemorySink.build({"max_value_bytes": 1_000_000}, context(timeout))
        self._sinks.append(sink)
        return sink

    async def received(self) -> list[Received]:
        return [
            Received(message.key, message.value, message.headers) for sink in self._sinks for message in sink.arrived
        ]

    def refuse_poison(self) -> None:
        for sink in self._sinks:
            sink.refuse(lambda message: message.value == POISON, tells_which=False)

    def go_away(self) -> None:
        for sink in self._sinks:
            sink.go_away()

    def freeze(self) -> None:
        for sink in self._sinks:
            sink.hold_answers()

    def come_back(self) -> None:
        for sink in self._sinks:
            sink.come_back()
            sink.let_go()


async def publish_until_delivered(sink: Sink, *batch: Message) -> None:
    """Publish until the destination accepts the whole batch."""

    async def delivered() -> bool:
        return not await sink.publish(batch)

    await await_until(delivered, timeout=120, what="the sink to recover")


def message(number: int, key: str | None = "k", value: bytes | None = None, **headers: str) -> Message:
    """Return a small message with its number as the value."""
    value = b"%d" % number if value is None else value
    return Message(f"event-{number}", key, value, {"event_id": f"event-{number}", **headers})


BACKENDS: Mapping[str, type[Backend]] = {
    "kafka-on-kfake": KafkaBackend,
    "kafka-on-apache": SharedKafkaBackend,
    "kafka-on-killable-apache": KafkaBackend,
    "pubsub-on-pstest": PubSubBackend,
    "log": LogBackend,
    "memory": MemoryBackend,
}


def on_backends(*features: str) -> pytest.MarkDecorator:
    """Run the test on every backend with these features.

    A killable Apache Kafka starts in half a minute, so it runs only in ``make verify``, for tests that kill it.
    """
    names = [name for name, kind in BACKENDS.items() if all(getattr(kind.features, feature) for feature in features)]
    killable = pytest.param("kafka-on-killable-apache", marks=pytest.mark.verify)
    chosen = [name for name in names if name != "kafka-on-killable-apache"]
    return pytest.mark.parametrize(
        "backend", [*chosen, *([killable] if "can_be_killed" in features else [])], indirect=True
    )
