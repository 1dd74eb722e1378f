"""Metadata requests and producers, shared by all sinks with the same connection settings.

A producer has threads, broker connections and buffers, so 100 subscriptions to one cluster use one producer. All
librdkafka settings belong to a producer (the Python client has no others), so sinks whose settings differ in any value,
secrets included, share nothing. Sinks whose topics have different maximum message sizes share no producer, because
``message.max.bytes`` bounds a whole Kafka batch. Sinks with different delivery timeouts share none either: a timeout
purges the messages of all sinks, so the shortest timeout would apply to all.

Every object belongs to one event loop and lives as long as a sink references it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from mailboat.errors import SinkUnavailable
from mailboat.sinks.daemon_thread import in_a_thread
from mailboat.sinks.kafka.librdkafka_settings import Settings, producer_settings
from mailboat.sinks.kafka.producer import ProducerEpoch
from mailboat.sinks.kafka.producer_share import ProducerShare
from mailboat.sinks.kafka.topic import TopicFacts, describe_topics

Fingerprint = frozenset[tuple[str, Any]]
_clusters: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Fingerprint, Cluster]] = WeakKeyDictionary()


def cluster_of(client: Mapping[str, Any], logger: logging.Logger) -> Cluster:
    """Return the cluster of the running event loop with these settings; create it if needed."""
    clusters = _clusters.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    fingerprint = Fingerprint(client.items())
    if (found := clusters.get(fingerprint)) is None:
        found = clusters[fingerprint] = Cluster(client, logger)
    return found


class Cluster:
    """One Kafka cluster, accessed with one set of client settings."""

    def __init__(self, client: Mapping[str, Any], logger: logging.Logger) -> None:
        self._client = client
        self._logger = logger
        self._producers: WeakValueDictionary[tuple[int, float], SharedProducer] = WeakValueDictionary()
        self._waiting: dict[str, float] = {}
        """Topics of the next metadata request, each with its timeout in seconds."""
        self._answers: dict[str, asyncio.Future[TopicFacts]] = {}
        self._asking = False

    def producer(self, max_message_bytes: int | None, delivery_timeout: float) -> SharedProducer:
        """Return the producer for topics with this maximum message size and sinks with this delivery timeout."""
        settings = producer_settings(self._client, max_message_bytes=max_message_bytes)
        key = (settings["message.max.bytes"], delivery_timeout)
        if (found := self._producers.get(key)) is None:
            found = self._producers[key] = SharedProducer(settings, self._logger)
        return found

    def describe(self, topic: str, timeout: float) -> asyncio.Future[TopicFacts]:
        """Request the metadata of a topic. Concurrent requests are combined and use one client.

        The future raises the errors of ``describe_topics``, and ``SinkUnavailable``. A caller that is cancelled must
        not cancel the future.
        """
        answer = self._answers.get(topic)
        if answer is None:
            answer = self._answers[topic] = asyncio.get_running_loop().create_future()
            self._waiting[topic] = timeout
            if not self._asking:
                self._asking = True
                asyncio.get_running_loop().call_soon(self._ask)
        return answer

    def _ask(self) -> None:
        topics, self._waiting = self._waiting, {}
        ask = partial(describe_topics, self._client, tuple(topics), timeout=max(topics.values()))
        in_a_thread(ask, "kafka-topics").add_done_callback(partial(self._tell, topics))

    def _tell(self, topics: Iterable[str], asked: asyncio.Future[dict[str, TopicFacts | SinkUnavailable]]) -> None:
        error = asked.exception()
        for topic in topics:
            answer, said = self._answers.pop(topic), error or asked.result()[topic]
            if isinstance(said, TopicFacts):
                answer.set_result(said)
            else:
                answer.set_exception(said)
                answer.exception()  # marks it as retrieved: the waiting caller may have been cancelled
        self._asking = bool(self._waiting)
        if self._asking:
            self._ask()


class SharedProducer:
    """Consecutive sessions, shared by sinks whose producers have the same settings.

    A sink that caused the end of a session uses a separate session until it has not failed for a while: a sink that
    failed once often fails again, and each failure costs the other sinks a new session.
    """

    def __init__(self, settings: Settings, logger: logging.Logger) -> None:
        self._settings = settings
        self._logger = logger
        self._session: ProducerEpoch | None = None

    def join(self, topic: str, *, apart: bool) -> ProducerShare:
        """Return a lane in the current session or in a new one. Raises ``NOT_ACCEPTED``."""
        if apart:
            return self._new_session().lane(topic)
        before = self._session
        if before is not None and before.takes_calls:
            return before.lane(topic)
        session = self._session = self._new_session()
        if before is not None:
            before.supersede()
        return session.lane(topic)

    def suits(self, lane: ProducerShare, *, apart: bool) -> bool:
        """Return whether a sink can keep using its lane."""
        session = lane.session
        ours = session.settings is self._settings
        return ours and session.takes_calls and apart == (session is not self._session)

    def _new_session(self) -> ProducerEpoch:
        return ProducerEpoch(self._settings, logger=self._logger)
