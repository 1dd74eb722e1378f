"""Topic metadata and producers, shared by all sinks with the same connection settings.

A producer has threads, broker connections and buffers, so 100 subscriptions to one cluster use one producer. All
librdkafka settings belong to a producer (the Python client has no others), so sinks whose settings differ in any value,
secrets included, share nothing. Sinks whose topics have different maximum message sizes share no producer, because
``message.max.bytes`` bounds a whole Kafka batch. Sinks with different delivery timeouts share none either: a timeout
purges the messages of all sinks, so the shortest timeout would apply to all.

Every object belongs to one event loop and lives as long as a sink references it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from mailboat.errors import SinkUnavailable
from mailboat.sinks.daemon_thread import in_a_thread
from mailboat.sinks.kafka.kafka_errors import Report, more_specific, no_answer, unavailable
from mailboat.sinks.kafka.librdkafka_settings import Settings, producer_settings
from mailboat.sinks.kafka.producer import ProducerEpoch
from mailboat.sinks.kafka.producer_share import ProducerShare

NOT_ACCEPTED: Final = (KafkaException, ValueError, TypeError)
"""Errors of a client constructor whose settings are unusable, for example because a referenced file was deleted."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    partitions: int
    max_message_bytes: int | None = None
    """None if the request failed or is not allowed. Then the brokers decide per message."""
    compacted: bool = False
    """True if the topic accepts no message without a key."""


Fingerprint = frozenset[tuple[str, Any]]
_clusters: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Fingerprint, Cluster]] = WeakKeyDictionary()


def cluster_of(client: Mapping[str, Any]) -> Cluster:
    """Return the cluster of the running event loop with these settings; create it if needed."""
    clusters = _clusters.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    fingerprint = Fingerprint(client.items())
    if (found := clusters.get(fingerprint)) is None:
        found = clusters[fingerprint] = Cluster(client)
    return found


class Cluster:
    """One Kafka cluster, accessed with one set of client settings."""

    def __init__(self, client: Mapping[str, Any]) -> None:
        self._client = client
        self._producers: WeakValueDictionary[tuple[int, float], SharedProducer] = WeakValueDictionary()
        self._requested: dict[str, float] = {}
        """Topics of the next metadata request, each with its timeout in seconds."""
        self._answers: dict[str, asyncio.Future[TopicFacts]] = {}
        """Answers to the current and to the next request. If there is none, no request runs."""

    def producer(self, max_message_bytes: int | None, delivery_timeout: float) -> SharedProducer:
        """Return the producer for topics with this maximum message size and sinks with this delivery timeout."""
        settings = producer_settings(self._client, max_message_bytes=max_message_bytes)
        key = (settings["message.max.bytes"], delivery_timeout)
        if (found := self._producers.get(key)) is None:
            found = self._producers[key] = SharedProducer(settings)
        return found

    def describe(self, topic: str, timeout: float) -> asyncio.Future[TopicFacts]:
        """Request the metadata of a topic. Concurrent requests use one client and one future, which a caller must not
        cancel. It raises ``SinkUnavailable`` and the errors of ``describe_topics``."""
        if topic not in self._answers:
            if not self._answers:
                asyncio.get_running_loop().call_soon(self._request)
            self._requested[topic] = timeout
            self._answers[topic] = asyncio.get_running_loop().create_future()
        return self._answers[topic]

    def _request(self) -> None:
        topics, self._requested = self._requested, {}
        request = partial(describe_topics, self._client, tuple(topics), timeout=max(topics.values()))
        in_a_thread(request, "kafka-topics").add_done_callback(partial(self._set_results, topics))

    def _set_results(
        self, topics: Iterable[str], response: asyncio.Future[dict[str, TopicFacts | SinkUnavailable]]
    ) -> None:
        error = response.exception()
        for topic in topics:
            answer, result = self._answers.pop(topic), error or response.result()[topic]
            if isinstance(result, TopicFacts):
                answer.set_result(result)
            else:
                answer.set_exception(result)
                answer.exception()  # marks it as retrieved: the waiting caller may have been cancelled
        if self._requested:
            self._request()


class SharedProducer:
    """Consecutive sessions, shared by sinks whose producers have the same settings. A sink that caused the end of one
    uses separate sessions for a while: it often fails again, and each failure costs the others a new session."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: ProducerEpoch | None = None

    def join(self, topic: str, *, separate: bool) -> ProducerShare:
        """Return a share in the current session or in a new one. Raises ``NOT_ACCEPTED``."""
        if separate:
            return ProducerEpoch(self._settings).new_share(topic)
        before = self._session
        if before is not None and before.takes_calls:
            return before.new_share(topic)
        session = self._session = ProducerEpoch(self._settings)
        if before is not None:
            before.supersede()
        return session.new_share(topic)

    def suits(self, share: ProducerShare, *, separate: bool) -> bool:
        """Return whether a sink can keep using its share."""
        session = share.session
        same_settings = session.settings is self._settings
        return same_settings and session.takes_calls and separate == (session is not self._session)


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

    quiet = {"allow.auto.create.topics": False, "enable.metrics.push": False, "log_level": 0}
    settings: dict[str, Any] = {**client, **quiet, "error_cb": on_error}
    admin = AdminClient(settings)
    partitions: dict[str, int] = {}
    answers: dict[str, TopicFacts | SinkUnavailable] = {}
    for topic in topics:
        try:
            found = admin.list_topics(topic, timeout=timeout).topics[topic]
        except KafkaException:
            admin.poll(0)  # runs ``error_cb``, whose error names more than "timed out"
            return dict.fromkeys(topics, no_answer(bootstrap, timeout, client_error))
        if found.error is None and found.partitions:
            partitions[topic] = len(found.partitions)
        else:
            error = KafkaError(KafkaError._UNKNOWN_TOPIC) if found.error is None else found.error
            answers[topic] = unavailable(Report.of(error, topic, -1), bootstrap)
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
