"""What the brokers say about a topic, asked when a sink opens and every few minutes after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from mailboat.sinks.kafka.errors import Report, missing_topic, no_answer, unavailable

FALLBACK_MAX_MESSAGE_BYTES: Final = 1_000_000
"""Where the client may not ask: a little below the brokers' own default."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    partitions: int
    max_message_bytes: int = FALLBACK_MAX_MESSAGE_BYTES
    compacted: bool = False
    """Takes no message without a key."""


def describe_topic(client: Mapping[str, Any], topic: str, *, timeout: float) -> TopicFacts:
    """Blocks. Raises ``SinkUnavailable``, also when there is no such topic."""
    bootstrap: str = client["bootstrap.servers"]
    complaints: list[Report] = []
    settings: dict[str, Any] = {
        **client,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        "log_level": 0,
        "error_cb": lambda error: complaints.append(Report.of(error, topic, -1)),
    }
    admin = AdminClient(settings)
    try:
        found = admin.list_topics(topic, timeout=timeout).topics[topic]
    except KafkaException as error:
        admin.poll(0)  # hear its complaints: they say more than "timed out"
        telling = [complaint for complaint in complaints if complaint.code != KafkaError._ALL_BROKERS_DOWN]
        raise no_answer(bootstrap, timeout, telling[-1] if telling else None) from error
    if found.error is not None:
        raise unavailable(Report.of(found.error, topic, -1), bootstrap)
    if not found.partitions:
        raise missing_topic(topic, bootstrap)
    return _with_limits(admin, topic, len(found.partitions), timeout)


def _with_limits(admin: AdminClient, topic: str, partitions: int, timeout: float) -> TopicFacts:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        entries = admin.describe_configs([resource], request_timeout=timeout)[resource].result(timeout + 1)
        return TopicFacts(
            partitions,
            max_message_bytes=int(entries["max.message.bytes"].value),
            compacted="compact" in (entries["cleanup.policy"].value or ""),
        )
    except (KafkaException, TimeoutError, KeyError, ValueError, TypeError):
        # A client that may write need not be allowed to ask.
        return TopicFacts(partitions)
