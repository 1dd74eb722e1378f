"""Topic metadata from the brokers, requested when a sink opens and every few minutes after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from mailboat.errors import SinkUnavailable
from mailboat.sinks.kafka.kafka_errors import Report, missing_topic, more_specific, no_answer, unavailable

NOT_ACCEPTED: Final = (KafkaException, ValueError, TypeError)
"""Errors of a client constructor whose settings are unusable, for example because a referenced file was deleted."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    partitions: int
    max_message_bytes: int | None = None
    """None if the request failed or is not allowed. Then the brokers decide per message."""
    compacted: bool = False
    """True if the topic accepts no message without a key."""

    def since(self, before: TopicFacts | None) -> TopicFacts:
        """Return these facts; if the limits are unknown, with the limits of ``before``."""
        if before is None or self.max_message_bytes is not None:
            return self
        return replace(before, partitions=self.partitions)


def describe_topics(
    client: Mapping[str, Any], topics: Sequence[str], *, timeout: float
) -> dict[str, TopicFacts | SinkUnavailable]:
    """Return the facts of each topic, or ``SinkUnavailable``, also for a missing topic. Blocks.

    Errors about the client's settings (``NOT_ACCEPTED``) are raised unchanged and may contain a secret. All others are
    returned: a traceback that references the client's frame would keep its threads and connections alive for as long as
    the error is referenced.
    """
    bootstrap: str = client["bootstrap.servers"]
    client_error: Report | None = None

    def on_error(error: KafkaError) -> None:
        nonlocal client_error
        client_error = more_specific(client_error, Report.of(error, "", -1))

    settings: dict[str, Any] = {
        **client,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        "log_level": 0,
        "error_cb": on_error,
    }
    admin = AdminClient(settings)
    partitions: dict[str, int] = {}
    answers: dict[str, TopicFacts | SinkUnavailable] = {}
    for topic in topics:
        try:
            found = admin.list_topics(topic, timeout=timeout).topics[topic]
        except KafkaException:
            admin.poll(0)  # runs ``error_cb``, whose error names more than "timed out"
            return dict.fromkeys(topics, no_answer(bootstrap, timeout, client_error))
        if found.error is not None:
            answers[topic] = unavailable(Report.of(found.error, topic, -1), bootstrap)
        elif not found.partitions:
            answers[topic] = missing_topic(topic, bootstrap)
        else:
            partitions[topic] = len(found.partitions)
    return answers | _with_limits(admin, partitions, timeout)


def _with_limits(admin: AdminClient, partitions: Mapping[str, int], timeout: float) -> dict[str, TopicFacts]:
    facts = {topic: TopicFacts(count) for topic, count in partitions.items()}
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in partitions]
    try:
        answers = admin.describe_configs(resources, request_timeout=timeout) if resources else {}
    except KafkaException:
        return facts
    for resource, answer in answers.items():
        try:
            entries = answer.result(timeout + 1)
            facts[resource.name] = TopicFacts(
                partitions[resource.name],
                max_message_bytes=int(entries["max.message.bytes"].value),
                compacted="compact" in (entries["cleanup.policy"].value or ""),
            )
        except (KafkaException, TimeoutError, KeyError, ValueError, TypeError):
            continue  # a client with Write permission need not have DescribeConfigs
    return facts
