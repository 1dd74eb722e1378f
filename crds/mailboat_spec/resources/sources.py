"""Sources: brokers that a subscription reads instead of an outbox, and the store that recognises redelivered events."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from mailboat_spec.base import Model
from mailboat_spec.formats import KafkaGroup, KafkaTopic, PubSubSubscription, RedisPrefix
from mailboat_spec.references import Connection, SecretKeyRef
from mailboat_spec.resources.kafka_settings import SOURCE_ALLOWED
from mailboat_spec.resources.sinks import KafkaServers, KafkaSettings, PubSubService
from mailboat_spec.rules import exactly_one
from mailboat_spec.scalars import Duration, between


class KafkaSource(KafkaServers):
    """A topic of Apache Kafka, or of another server with its protocol."""

    topic: KafkaTopic
    """Topic that events are consumed from."""
    group: KafkaGroup | None = None
    """Consumer group, which stores the progress. Default: none, which means NAMESPACE.NAME of this subscription."""
    group_protocol: Literal["Classic", "Consumer"] = "Classic"
    """Classic (every broker) or Consumer (KIP-848, Apache Kafka 4.0 and later). Default: Classic."""
    config: Annotated[Mapping[str, str], KafkaSettings(SOURCE_ALLOWED)] = Field(default_factory=dict)
    """Settings of librdkafka for the consumer and for the producer of dead letters, each value in quotes, for example
    security.protocol: SASL_SSL. Those that run commands, read files or weaken guarantees are refused. Secrets go into
    configSecretRef. Default: none."""


class PubSubSource(PubSubService):
    """A subscription of Google Cloud Pub/Sub."""

    subscription: PubSubSubscription
    """Pub/Sub subscription that events are pulled from, without projects/.../subscriptions/."""


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
        chosen = self.kafka or self.pubsub
        assert chosen is not None, "validated"
        return chosen

    @property
    def stream(self) -> str:
        """Name of what is read, for status and for names of dead-letter topics."""
        chosen = self.chosen
        return chosen.topic if isinstance(chosen, KafkaSource) else chosen.subscription


class IdempotencyRedis(Connection):
    """Redis or Valkey."""

    schemes = ("rediss", "redis", "rediss+sentinel", "redis+sentinel", "rediss+cluster", "redis+cluster")

    ca_secret_ref: SecretKeyRef | None = None
    """Key of a Secret that holds the CA certificates of the server in PEM, for URLs with rediss. Default: none, the
    certificates of the system."""
    prefix: RedisPrefix = "mailboat"
    """First part of the keys, which are PREFIX:CONSUMER:EVENT-ID. Default: mailboat."""
    consumer: RedisPrefix | None = None
    """Second part of the keys. Set it to continue with the keys of another helper. Default: none, which means
    NAMESPACE.NAME of this subscription."""
    replicas: int = Field(default=0, strict=True, ge=0, le=5)
    """Replicas that must confirm a write before an event counts as handled, between 0 and 5. Default: 0, none."""


class IdempotencyPostgres(Connection):
    """An inbox table in the database of the handlers' effects."""

    schemes = ("postgresql", "postgres")


class Idempotency(Model):
    """Store that recognises events that were handled before. Exactly one of ``redis`` and ``postgres``."""

    constraints = exactly_one(
        "redis",
        "postgres",
        none="needs exactly one of redis and postgres",
        both="has redis and postgres: remove one of them",
    )

    redis: IdempotencyRedis | None = None
    """Redis or Valkey remembers handled events: effects happen at least once, and twice only after a crash between
    effect and mark. Default: none."""
    postgres: IdempotencyPostgres | None = None
    """An inbox table remembers handled events, in the transaction of the handler: effects in that database happen
    exactly once. Default: none."""
    ttl: Annotated[Duration, between("1m", "87600h")] = Duration.parse("720h")
    """How long a handled event is remembered, as a duration between 1m and 87600h. Default: 720h."""
    lease: Annotated[Duration, between("1s", "1h")] = Duration.parse("30s")
    """Time after which the event of a dead consumer is handled by another one, as a duration between 1s and 1h. Leases
    are renewed while handlers run. Default: 30s."""
    on_unavailable: Literal["Wait", "Handle"] = "Wait"
    """What happens while the store can't be reached: Wait (nothing is handled, no attempt is counted) or Handle
    (without detection of duplicates). Default: Wait."""
