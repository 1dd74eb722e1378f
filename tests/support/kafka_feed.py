"""Events on a Kafka topic, and the committed offsets of a consumer group."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from mailboat_devservers.kafka import KafkaServer


class Feed:
    """Producer of events of one topic, with a record of them."""

    def __init__(self, server: KafkaServer, topic: str) -> None:
        self.topic = topic
        self.sent: list[tuple[str, int]] = []
        """Key and number of each event."""
        self.ids: list[str] = []
        """Event ids, in the same order."""
        self._numbers: dict[str, int] = {}
        self._producer = Producer({"bootstrap.servers": server.bootstrap, "linger.ms": 5, "enable.idempotence": True})

    def send(self, keys: Iterable[str], *, event_type: str = "x", value: bytes | None = None, **where: Any) -> None:
        """Send one event per key; events of a key are numbered from 1. ``partition=`` chooses a partition."""
        for key in keys:
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
            body = value or json.dumps({"key": key, "number": number}).encode()
            self.ids.append(self.produce(key, body, event_type=event_type, **where))
            self.sent.append((key, number))
        self.flush()

    def produce(self, key: str, value: bytes, *, event_type: str = "x", **where: Any) -> str:
        """Produce one event without waiting for the broker, and return its id."""
        event_id = str(uuid4())
        headers: dict[str, str | bytes | None]
        headers = {"ce_id": event_id, "ce_type": event_type, "ce_specversion": "1.0"}
        while True:
            try:
                self._producer.produce(self.topic, value, key.encode(), headers=headers, **where)
                return event_id
            except BufferError:
                self._producer.poll(0.1)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0


def committed(server: KafkaServer, topic: str, group: str, partitions: int) -> dict[int, int]:
    """Return the committed offsets of a group by partition, or none if the broker does not have the group yet."""
    client = Consumer({"bootstrap.servers": server.bootstrap, "group.id": group, "log_level": 0})
    try:
        wanted = [TopicPartition(topic, number) for number in range(partitions)]
        return {each.partition: each.offset for each in client.committed(wanted, 10) if each.offset >= 0}
    except KafkaException:
        return {}
    finally:
        client.close()
