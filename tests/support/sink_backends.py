"""The destinations that the conformance suite runs on, behind one face: make a sink, break the way to it, read back.

Each backend says what it can do in a ``Features`` object; a test says what it needs by ``on_all_that``.
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
"""A value that ``Backend.refuse_poison`` makes the destination refuse."""
_UNIMPORTANT = "file.delete.delay.ms"
"""A setting of a topic that no test cares about."""


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
    can_be_away: bool = True
    keeps_null_values: bool = True
    too_large: int = 12_000_000
    """Bytes of a value that ``refusal`` must refuse; 0: there is no limit."""


def context(timeout: float = 60.0, secrets_: Mapping[str, str] | None = None) -> SinkContext:
    return SinkContext(subscription="shop/orders", delivery_timeout=timeout, secrets=secrets_ or {})


class Backend(abc.ABC):
    """One fresh, empty destination."""

    features = Features()

    @abc.abstractmethod
    def sink(self, *, timeout: float = 60.0, topic: str | None = None, config: Mapping[str, str] | None = None) -> Sink:
        """A sink that is not open yet. ``config`` counts on Kafka only."""

    @abc.abstractmethod
    async def received(self) -> list[Received]:
        """All that has arrived so far; in the order of arrival, per key at least."""

    def refuse_poison(self) -> None:
        """From now on the destination itself refuses every message whose value is POISON. After ``open``."""
        raise NotImplementedError

    def go_away(self) -> None:
        """Nothing listens any more."""
        raise NotImplementedError

    def go_deaf(self) -> None:
        """Connections stand, nobody answers."""
        raise NotImplementedError

    def come_back(self) -> None:
        """From either."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """The end of the test."""

    async def receive(self, count: int) -> list[Received]:
        """Wait for at least so many."""

        async def enough() -> list[Received]:
            received = await self.received()
            return received if len(received) >= count else []

        return await await_until(enough, timeout=60, what=f"{count} messages") if count else await self.received()


class KafkaBackend(Backend):
    features = Features(too_large=1_100_000)

    def __init__(self, server: KafkaServer, partitions: int = 4, topic: str | None = None) -> None:
        """``topic``: a topic that exists; else one is created."""
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
        """Returns once the broker heeds it."""
        admin = AdminClient({"bootstrap.servers": self.server.bootstrap, "log_level": 0})
        self._set(admin, name, value)
        # Apache Kafka shows a change before its logs heed it. It finishes one change before it shows the next, so one
        # more, which nobody cares about, tells. (kfake does both at once, and has no such setting.)
        if unimportant := self._settings(admin).get(_UNIMPORTANT):
            self._set(admin, _UNIMPORTANT, str(int(unimportant) + 1))

    def _set(self, admin: AdminClient, name: str, value: str) -> None:
        """Returns once the broker shows it."""
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

    def go_deaf(self) -> None:
        self.server.suspend()
        self._broken = self.server.resume

    def come_back(self) -> None:
        if self._broken is not None:
            mend, self._broken = self._broken, None
            mend()

    def close(self) -> None:
        self.come_back()


def _high_watermark(consumer: Consumer, place: TopicPartition) -> int:
    """Asked again where nobody leads the partition: so it is, for a moment, if the broker was silent for too long."""

    def told() -> list[int]:
        try:
            return [consumer.get_watermark_offsets(place, timeout=60)[1]]
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE):
                return []
            raise

    (high,) = wait_until(told, what=f"a leader of {place}")
    return high


def _from_kafka(message: Any) -> Received:
    key = message.key()
    headers = {name: value.decode() for name, value in message.headers() or []}
    return Received(None if key is None else key.decode(), message.value(), headers, message.partition())


class SharedKafkaBackend(KafkaBackend):
    """On a broker that other tests use too, so that it cannot be killed."""

    features = replace(KafkaBackend.features, can_be_away=False)


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
            # By hand: the client warns of return_immediately, which is right for services and wrong for tests.
            request = PullRequest(subscription=self._subscription, max_messages=1000, return_immediately=True)
            found = self._pull(request, timeout=60).received_messages
            if not found:
                return [self._received[number] for number in sorted(self._received)]
            for item in found:
                message = item.message
                number = int(message.message_id.removeprefix("m"))  # the fake counts them as they come
                self._received[number] = Received(
                    message.ordering_key or None, bytes(message.data), dict(message.attributes)
                )
            self._subscriber.acknowledge(subscription=self._subscription, ack_ids=[item.ack_id for item in found])

    @property
    def published(self) -> list[int]:
        """Of each request that the server got, how many messages it held."""
        return self._refusing.published

    def refuse_poison(self, answer: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        self._refusing.poison, self._refusing.answer = POISON, answer

    def go_away(self) -> None:
        self._proxy.stop()

    def go_deaf(self) -> None:
        self._proxy.deafen()

    def come_back(self) -> None:
        self._proxy.start()
        self._proxy.undeafen()

    def close(self) -> None:
        self._proxy.close()
        self._refusing.close()
        self._channel.close()


class LogBackend(Backend):
    features = Features(refuses_at_the_destination=False, has_topics=False, can_be_away=False, too_large=0)

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

    def go_deaf(self) -> None:
        for sink in self._sinks:
            sink.hold_answers()

    def come_back(self) -> None:
        for sink in self._sinks:
            sink.come_back()
            sink.let_go()


async def until_it_arrives(sink: Sink, *batch: Message) -> None:
    """Publish until the destination has recovered enough to take all of it."""

    async def arrives() -> bool:
        return not await sink.publish(batch)

    arrived: bool = await await_until(arrives, timeout=120, what="the sink to recover")
    assert arrived


def message(number: int, key: str | None = "k", value: bytes | None = None, **headers: str) -> Message:
    """A small message; its value says who it is."""
    value = b"%d" % number if value is None else value
    return Message(f"event-{number}", key, value, {"event_id": f"event-{number}", **headers})


BACKENDS: Mapping[str, type[Backend]] = {
    "kafka-on-kfake": KafkaBackend,
    "kafka-on-apache": SharedKafkaBackend,
    "kafka-on-mortal-apache": KafkaBackend,
    "pubsub-on-pstest": PubSubBackend,
    "log": LogBackend,
    "memory": MemoryBackend,
}


def on_all_that(*features: str) -> pytest.MarkDecorator:
    """The test runs on every backend that has these features.

    An Apache Kafka that may be killed costs half a minute, so it serves only tests that kill it, in ``make verify``.
    """
    names = [name for name, kind in BACKENDS.items() if all(getattr(kind.features, feature) for feature in features)]
    mortal = pytest.param("kafka-on-mortal-apache", marks=pytest.mark.verify)
    chosen = [name for name in names if name != "kafka-on-mortal-apache"]
    return pytest.mark.parametrize(
        "backend", [*chosen, *([mortal] if "can_be_away" in features else [])], indirect=True
    )
