"""What the brokers say about a topic, asked when a sink opens and every few minutes after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from mailboat.errors import SinkUnavailable
from mailboat.sinks.kafka.errors import Report, missing_topic, more_telling, no_answer, unavailable

NOT_ACCEPTED: Final = (KafkaException, ValueError, TypeError)
"""What a client raises when it is made with settings that it can't use: a file that they name may be gone by now."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    partitions: int
    max_message_bytes: int | None = None
    """None: nobody could say, or the client may not ask. Then the brokers decide, message by message."""
    compacted: bool = False
    """Takes no message without a key."""

    def since(self, before: TopicFacts | None) -> TopicFacts:
        """These facts, where they leave the limits open with those that were known before."""
        if before is None or self.max_message_bytes is not None:
            return self
        return replace(before, partitions=self.partitions)


def describe_topic(client: Mapping[str, Any], topic: str, *, timeout: float) -> TopicFacts:
    """Blocks. Raises ``SinkUnavailable``, also when there is no such topic.

    What the client has against its settings (``NOT_ACCEPTED``) is raised as it is: it may hold a secret.
    """
    answer = _ask(client, topic, timeout)
    if isinstance(answer, SinkUnavailable):
        # Raised from here: a traceback that holds the client's frame would keep its threads and connections alive for
        # as long as somebody remembers the error.
        raise answer
    return answer


def _ask(client: Mapping[str, Any], topic: str, timeout: float) -> TopicFacts | SinkUnavailable:
    bootstrap: str = client["bootstrap.servers"]
    complaint: Report | None = None

    def complain(error: KafkaError) -> None:
        nonlocal complaint
        complaint = more_telling(complaint, Report.of(error, topic, -1))

    settings: dict[str, Any] = {
        **client,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        "log_level": 0,
        "error_cb": complain,
    }
    admin = AdminClient(settings)
    try:
        found = admin.list_topics(topic, timeout=timeout).topics[topic]
    except KafkaException:
        admin.poll(0)  # hear its complaints: they say more than "timed out"
        return no_answer(bootstrap, timeout, complaint)
    if found.error is not None:
        return unavailable(Report.of(found.error, topic, -1), bootstrap)
    if not found.partitions:
        return missing_topic(topic, bootstrap)
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
