"""Brokers that lose nothing they acknowledged, refuse what they should, and can be taken away."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer
from google.api_core.exceptions import NotFound
from google.pubsub_v1 import PublisherClient, PubsubMessage, SubscriberClient

from mailboat_harbor.kafka import KafkaServer, start_apache_kafka, start_kfake
from mailboat_harbor.pubsub import PubSubServer, start_pstest


def produce(server: KafkaServer, topic: str, values: list[bytes], **settings: object) -> list[KafkaError | None]:
    """What became of each message."""
    answers: list[KafkaError | None] = []
    config = {"bootstrap.servers": server.bootstrap, "acks": "all", "delivery.timeout.ms": 60_000, "log_level": 0}
    producer = Producer({**config, **settings})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: answers.append(error))
    producer.flush(70)
    return answers


def consume(server: KafkaServer, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": server.bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        messages: list[Message] = []
        while len(messages) < count:
            batch = consumer.consume(count - len(messages), timeout=60)
            assert batch, f"{len(messages)} of {count} messages came"
            messages += batch
        return [message.value() for message in messages]
    finally:
        consumer.close()


def test_messages_pass_through(each_kafka: KafkaServer, kafka_topic: Callable[..., str]) -> None:
    topic = kafka_topic(each_kafka, partitions=1)
    assert produce(each_kafka, topic, [b"one", b"two"]) == [None, None]
    assert consume(each_kafka, topic, 2) == [b"one", b"two"]


def test_a_topic_that_nobody_created_does_not_exist(each_kafka: KafkaServer, unique_name: Callable[[str], str]) -> None:
    [error] = produce(each_kafka, unique_name("nowhere"), [b"x"], **{"delivery.timeout.ms": 1500})
    assert error is not None
    assert error.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError._MSG_TIMED_OUT, KafkaError.UNKNOWN_TOPIC_OR_PART)


def test_the_topic_limits_the_size_of_messages(each_kafka: KafkaServer, kafka_topic: Callable[..., str]) -> None:
    topic = kafka_topic(each_kafka, config={"max.message.bytes": "1000"})
    [error] = produce(each_kafka, topic, [b"x" * 5000])
    assert error is not None
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE


@pytest.mark.parametrize(
    "start", [start_kfake, functools.partial(start_apache_kafka, to_be_killed=True)], ids=["kfake", "apache"]
)
def test_what_was_acknowledged_survives_a_kill(
    start: Callable[[Path], KafkaServer], tmp_path: Path, or_skip: Callable[..., KafkaServer]
) -> None:
    with or_skip(lambda: start(tmp_path / "broker")) as broker:
        broker.create_topic("kept", partitions=1)
        assert produce(broker, "kept", [b"one", b"two"]) == [None, None]
        broker.kill()
        broker.restart()
        assert consume(broker, "kept", 2) == [b"one", b"two"]


def test_a_suspended_broker_answers_nobody_until_it_is_resumed(or_skip: Callable[..., KafkaServer]) -> None:
    with or_skip(start_kfake) as broker:
        broker.create_topic("t", partitions=1)
        broker.suspend()
        [error] = produce(broker, "t", [b"x"], **{"delivery.timeout.ms": 500, "linger.ms": 0})
        assert error is not None
        assert error.code() == KafkaError._MSG_TIMED_OUT
        broker.resume()
        assert produce(broker, "t", [b"y"]) == [None]


Client = TypeVar("Client", PublisherClient, SubscriberClient)


def connected(kind: type[Client], server: PubSubServer) -> Client:
    transport = kind.get_transport_class("grpc")
    return kind(transport=transport(channel=grpc.insecure_channel(server.host)))


def test_pubsub_delivers_and_forgets_when_it_restarts(or_skip: Callable[..., PubSubServer]) -> None:
    with or_skip(start_pstest) as server:
        topic, subscription = "projects/p/topics/t", "projects/p/subscriptions/s"
        with (
            connected(PublisherClient, server) as publisher,
            connected(SubscriberClient, server) as subscriber,
        ):
            publisher.create_topic(name=topic)
            subscriber.create_subscription(name=subscription, topic=topic)
            publisher.publish(topic=topic, messages=[PubsubMessage(data=b"hello", ordering_key="k")])
            [received] = subscriber.pull(subscription=subscription, max_messages=10).received_messages
            assert (received.message.data, received.message.ordering_key) == (b"hello", "k")
        server.kill()
        server.restart()
        with connected(PublisherClient, server) as publisher, pytest.raises(NotFound):
            publisher.get_topic(topic=topic)
