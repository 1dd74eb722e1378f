"""Sources: brokers that a subscription reads instead of an outbox. ``Source`` contains exactly one of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from mailboat_spec.base import Model
from mailboat_spec.formats import KafkaGroup, KafkaTopic, PubSubSubscription
from mailboat_spec.resources import kafka_settings
from mailboat_spec.resources.sinks import KafkaServers, KafkaSettings, PubSubService
from mailboat_spec.rules import exactly_one


class GroupProtocol(StrEnum):
    """Protocol of a Kafka consumer group."""

    CLASSIC = "Classic"
    """Cooperative-sticky assignment by the clients. Works with every broker."""
    CONSUMER = "Consumer"
    """KIP-848: the broker assigns partitions. Needs Apache Kafka 4.0."""


class KafkaSource(KafkaServers):
    """A topic of Apache Kafka, or of another server with its protocol."""

    topic: KafkaTopic
    """Topic that events are consumed from."""
    group: KafkaGroup | None = None
    """Consumer group, which stores the progress. Default: none, which means NAMESPACE.NAME of this subscription."""
    group_protocol: GroupProtocol = GroupProtocol.CLASSIC
    """Classic (every broker) or Consumer (KIP-848, Apache Kafka 4.0 and later). Default: Classic."""
    config: Annotated[
        Mapping[str, str], KafkaSettings("configSecretRef: {name: ...}", kafka_settings.SOURCE_ALLOWED)
    ] = Field(default_factory=dict)
    """Settings of librdkafka for the consumer and for the producer of dead letters, each value in quotes, for example
    security.protocol: SASL_SSL. Those that run commands, read files or weaken guarantees are refused. Secrets go into
    configSecretRef. Default: none."""

    @property
    def stream(self) -> str:
        """Name of what is read, for status and for names of dead-letter topics."""
        return self.topic


class PubSubSource(PubSubService):
    """A subscription of Google Cloud Pub/Sub."""

    subscription: PubSubSubscription
    """Pub/Sub subscription that events are pulled from, without projects/.../subscriptions/."""

    @property
    def stream(self) -> str:
        """Name of what is read, for status and for names of dead-letter topics."""
        return self.subscription


class Source(Model):
    """Exactly one broker."""

    constraints = exactly_one(
        "kafka",
        "pubsub",
        none="needs exactly one of kafka and pubsub",
        both="has kafka and pubsub: keep one, and give the other one a subscription of its own",
    )

    kafka: KafkaSource | None = None
    """A topic of Apache Kafka, or of anything that speaks its protocol. Events of one key are handled in order, one at
    a time. Default: none."""
    pubsub: PubSubSource | None = None
    """A subscription of Google Cloud Pub/Sub. With message ordering enabled, events of one ordering key are handled in
    order, one at a time. Default: none."""

    @property
    def kind(self) -> str:
        """YAML name of the chosen source: ``kafka`` or ``pubsub``."""
        return "pubsub" if self.kafka is None else "kafka"

    @property
    def chosen(self) -> KafkaSource | PubSubSource:
        """The chosen source."""
        chosen = self.kafka or self.pubsub
        assert chosen is not None, "validated"
        return chosen
