"""Readers of the audit: all messages of a destination, in the order of arrival."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from confluent_kafka import Consumer, TopicPartition

from mailboat_demo.verification import Arrival
from shop.sequence_numbers import Stamped
from shop.topics import AUDIT

if TYPE_CHECKING:  # the import takes a second of CPU time, and most commands do not need it
    from google.cloud import pubsub_v1

_TIMEOUT = 60.0


class Received(NamedTuple):
    """A message as a consumer receives it."""

    headers: Mapping[str, str]
    body: bytes


def stamped(message: Received) -> Stamped:
    headers, data = message
    body = json.loads(data)
    event_id = headers.get("ce_id") or headers["ce-id"]
    replay = headers.get("mailboat-replay") == "true"
    generation, partition, sequence = map(int, headers["mailboat-sequence"].split("."))
    return Stamped(
        Arrival(event_id, body["order"], body["version"], replay),
        generation=generation,
        partition=partition,
        sequence=sequence,
        attempt=int(headers.get("mailboat-attempt", 1)),
        body=data,
    )


def from_kafka(bootstrap: str, topic: str) -> Iterator[Received]:
    """Yield the messages of all partitions up to the current high watermarks."""
    with _consumer(bootstrap) as consumer:
        for place, low, high in _partitions(consumer, topic):
            consumer.assign([TopicPartition(topic, place.partition, low)])
            at = low
            while at < high:
                message = consumer.poll(_TIMEOUT)
                if message is None:
                    raise TimeoutError(f"the high watermark of {place} is {high}, and no message came after {at}")
                offset = message.offset()
                if message.error() is None and offset is not None:
                    at = offset + 1
                    headers = cast("list[tuple[str, bytes]]", message.headers() or [])
                    yield Received({name: value.decode() for name, value in headers}, message.value() or b"")


def arrived_at_kafka(bootstrap: str, topic: str) -> int:
    """Number of messages in a topic."""
    with _consumer(bootstrap) as consumer:
        return sum(high for _, _, high in _partitions(consumer, topic))


@contextmanager
def _consumer(bootstrap: str) -> Iterator[Consumer]:
    # A fetch for the next partition waits for the pending fetch of the last one, which would wait for new messages.
    quick = {"fetch.wait.max.ms": 20}
    own = {"bootstrap.servers": bootstrap, "group.id": "audit", "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer({**own, **quick})
    try:
        yield consumer
    finally:
        consumer.close()


def _partitions(consumer: Consumer, topic: str) -> Iterator[tuple[TopicPartition, int, int]]:
    for partition in consumer.list_topics(topic, timeout=_TIMEOUT).topics[topic].partitions:
        place = TopicPartition(topic, partition)
        low, high = consumer.get_watermark_offsets(place, timeout=_TIMEOUT)
        yield place, low, high


def from_pubsub(project: str, topic: str) -> Iterator[Received]:
    """Yield all messages of the audit's subscription. Since Pub/Sub delivers them once, a file keeps them."""
    from google.cloud import pubsub_v1

    kept = Path(tempfile.gettempdir()) / f"{project}.{topic}.received"
    client = pubsub_v1.SubscriberClient()
    subscription = client.subscription_path(project, f"{topic}.{AUDIT}")
    with kept.open("a", encoding="utf-8") as book:
        while waiting := _pull(client, subscription):
            for received in waiting:
                message = received.message
                book.write(json.dumps([dict(message.attributes), message.data.decode()]) + "\n")
            book.flush()
            client.acknowledge(subscription=subscription, ack_ids=[received.ack_id for received in waiting])
    for line in kept.read_text(encoding="utf-8").splitlines():
        headers, body = json.loads(line)
        yield Received(headers, body.encode())


def _pull(client: pubsub_v1.SubscriberClient, subscription: str) -> list[pubsub_v1.types.ReceivedMessage]:
    from google.api_core.exceptions import DeadlineExceeded

    try:
        return list(client.pull(subscription=subscription, max_messages=1000, timeout=3.0).received_messages)
    except DeadlineExceeded:
        return []
