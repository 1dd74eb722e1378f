"""Parts of a broker consumer from its EventSubscription: source, claim store, execution, dead letters, settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mailboat.consumer.broker.dead_letter_access import client_of
from mailboat.consumer.broker.dead_letter_writer import DeadLetterTopic
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.engine import EngineSettings
from mailboat.consumer.broker.envelope import replay_group
from mailboat.consumer.broker.execution import PlainExecution
from mailboat.consumer.broker.filtered_source import FilteredSource
from mailboat.consumer.broker.interfaces import Execution, PassingPoint, Source
from mailboat.consumer.claims.inbox import InboxClaims, InboxExecution
from mailboat.consumer.claims.redis_health import Problem
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.handlers import TransactionKind
from mailboat.consumer.pull_statements import PullArguments
from mailboat.consumer.session_factory import SessionFactory, libpq_url
from mailboat.delivery.backoff import Backoff
from mailboat.errors import ConfigError
from mailboat.runtime.secrets import Secrets
from mailboat.sinks.protocol import SinkContext
from mailboat.sinks.registry import build_sink
from mailboat_spec import (
    Connection,
    EventSubscription,
    Idempotency,
    IdempotencyPostgres,
    KafkaSink,
    KafkaSource,
    PubSubSink,
    PubSubSource,
    SecretKeyRef,
    Sink,
    full_name,
)
from mailboat_spec.resources.kafka_settings import CONSUMER_ONLY

if TYPE_CHECKING:
    from mailboat.consumer.broker.dead_count import WaitingLetters


def engine_settings(resource: EventSubscription, concurrency: int | None) -> EngineSettings:
    spec, backoff = resource.spec, resource.spec.delivery.backoff
    stop_at = spec.delivery.dead_letter.stop_at if spec.delivery.dead_letter is not None else None
    return EngineSettings(
        consumer=full_name(resource),
        group=resource.group if spec.source is not None and spec.source.kafka is not None else None,
        concurrency=concurrency or spec.handlers,
        max_attempts=spec.max_attempts,
        backoff=Backoff(backoff.initial.seconds, backoff.factor, backoff.max.seconds, backoff.jitter),
        timeout=spec.delivery.timeout.seconds,
        stop_at=None if stop_at is None else stop_at.consecutive,
        handle_unclaimed=spec.idempotency is not None and spec.idempotency.on_unavailable == "Handle",
    )


def build_source(resource: EventSubscription, secrets: Secrets, passing: PassingPoint) -> Source:
    """Build the source without connecting. Raises ``ConfigError``."""
    assert resource.spec.source is not None, "the resource has a source"
    chosen = resource.spec.source.chosen
    found = _secrets_of(chosen, secrets, f"EventSubscription {full_name(resource)}: spec.source")
    source = (
        _kafka(resource, chosen, found, passing)
        if isinstance(chosen, KafkaSource)
        else _pubsub(resource, chosen, found, passing)
    )
    filter_ = resource.spec.filter
    return FilteredSource(source, filter_) if filter_.event_types or filter_.aggregate_types else source


def _kafka(
    resource: EventSubscription, chosen: KafkaSource, secrets: Mapping[str, str], passing: PassingPoint
) -> Source:
    try:
        from mailboat.consumer.broker.kafka_client import consumer_settings
        from mailboat.consumer.broker.kafka_source import KafkaSource as Client
    except ModuleNotFoundError as error:
        raise _not_installed("kafka", error) from error
    settings = consumer_settings(
        chosen.bootstrap_servers,
        chosen.config,
        secrets,
        subscription=full_name(resource),
        group=resource.group,
        group_protocol=chosen.group_protocol.lower(),
        start=resource.spec.start.from_.lower(),
    )
    return Client(settings, chosen.topic, decode, consumer=full_name(resource), passing=passing)


def _pubsub(
    resource: EventSubscription, chosen: PubSubSource, secrets: Mapping[str, str], passing: PassingPoint
) -> Source:
    try:
        from mailboat.consumer.broker.pubsub_source import PubSubSettings
        from mailboat.consumer.broker.pubsub_source import PubSubSource as Client
        from mailboat.sinks.pubsub.channel import PubSubEndpoint
    except ModuleNotFoundError as error:
        raise _not_installed("pubsub", error) from error
    reference = chosen.credentials_secret_ref
    key_file = None if reference is None else secrets[reference.key]
    where = f"{full_name(resource)}: spec.source.pubsub"
    destination = PubSubEndpoint.choose(chosen.endpoint, os.environ.get("PUBSUB_EMULATOR_HOST"), key_file, where)
    settings = PubSubSettings(project=chosen.project, subscription=chosen.subscription, destination=destination)
    return Client(settings, decode, passing)


@dataclass(slots=True)
class Memory:
    """How a consumer remembers handled events, and runs its handlers accordingly."""

    claims: RedisClaims | InboxClaims | None
    execution: Execution
    sessions: SessionFactory | None = None
    """Connections of the inbox. They are closed last."""

    @property
    def problems(self) -> Sequence[Problem]:
        """Reasons not to rely on the store."""
        return self.claims.problems if isinstance(self.claims, RedisClaims) else ()


def build_memory(
    resource: EventSubscription, secrets: Secrets, kind: TransactionKind | None, *, instance: str | None, size: int
) -> Memory:
    """Build claim store and execution without connecting. Raises ``ConfigError``.

    ``kind``: transaction that handlers want. ``size``: number of handlers that run at the same time.
    """
    store = resource.spec.idempotency
    if store is not None and store.postgres is not None:
        return _inbox(resource, store.postgres, secrets, kind, instance=instance, size=size)
    if kind is not None:
        raise ConfigError(
            f"consumer {full_name(resource)}: a handler wants a {kind.value}, and without an inbox there is no"
            " transaction: set spec.idempotency.postgres, or use a pull subscription"
        )
    claims = None if store is None else _redis(resource, store, secrets, instance)
    return Memory(claims, PlainExecution(size))


def _inbox(
    resource: EventSubscription,
    postgres: IdempotencyPostgres,
    secrets: Secrets,
    kind: TransactionKind | None,
    *,
    instance: str | None,
    size: int,
) -> Memory:
    name, store = full_name(resource), resource.spec.idempotency
    assert store is not None, "the caller has looked"
    url = url_of(postgres, secrets, f"EventSubscription {name}: spec.idempotency.postgres")
    claims = InboxClaims(
        libpq_url(url), consumer=name, ttl=store.ttl.seconds, lease=store.lease.seconds, instance=instance
    )
    sessions = SessionFactory(kind, url, PullArguments(name, None, None), size=size)
    return Memory(claims, InboxExecution(sessions.open, consumer=name), sessions)


def _redis(resource: EventSubscription, store: Idempotency, secrets: Secrets, instance: str | None) -> RedisClaims:
    assert store.redis is not None, "the spec demands one of the two"
    where = f"EventSubscription {full_name(resource)}: spec.idempotency.redis"
    reference = store.redis.ca_secret_ref
    ca_pem = None if reference is None else _read(reference, secrets, f"{where}.caSecretRef")
    try:
        return RedisClaims(
            url_of(store.redis, secrets, where),
            ca_pem=ca_pem,
            consumer=store.redis.consumer or f"{resource.metadata.namespace}.{resource.metadata.name}",
            prefix=store.redis.prefix,
            ttl=store.ttl.seconds,
            lease=store.lease.seconds,
            instance=instance,
            replicas=store.redis.replicas,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def build_dead_letters(resource: EventSubscription, secrets: Secrets) -> DeadLetterTopic:
    """Build the writer of dead letters, with the servers and settings of the source. Raises ``ConfigError``."""
    assert resource.spec.source is not None, "the resource has a source"
    chosen, topic = resource.spec.source.chosen, resource.dead_letter_topic
    assert topic is not None, "a source has a default"
    found = _secrets_of(chosen, secrets, f"EventSubscription {full_name(resource)}: spec.source")
    sink: dict[str, Any]
    if isinstance(chosen, KafkaSource):
        config = {name: value for name, value in chosen.config.items() if name not in CONSUMER_ONLY}
        found = {name: value for name, value in found.items() if name not in CONSUMER_ONLY}
        sink = {"kafka": KafkaSink(bootstrap_servers=chosen.bootstrap_servers, topic=topic, config=config)}
    else:
        sink = {
            "pubsub": PubSubSink(
                project=chosen.project,
                topic=topic,
                endpoint=chosen.endpoint,
                credentials_secret_ref=chosen.credentials_secret_ref,
            )
        }
    context = SinkContext(full_name(resource), resource.spec.delivery.timeout.seconds, found)
    return DeadLetterTopic(build_sink(Sink(**sink), context), topic)


def build_waiting_letters(resource: EventSubscription, secrets: Secrets) -> WaitingLetters | None:
    """Build the count of dead letters on the topic; None for a broker that does not tell it."""
    assert resource.spec.source is not None, "the resource has a source"
    kafka, topic = resource.spec.source.kafka, resource.dead_letter_topic
    if kafka is None or topic is None:
        return None
    from mailboat.consumer.broker.dead_count import WaitingLetters

    found = _secrets_of(kafka, secrets, f"EventSubscription {full_name(resource)}: spec.source")
    return WaitingLetters(client_of(kafka, found), topic, replay_group(resource.group))


def url_of(connection: Connection, secrets: Secrets, where: str) -> str:
    """Return the URL of a connection, from the manifest or from its Secret."""
    if connection.url is not None:
        return connection.url
    assert connection.url_secret_ref is not None, "the spec demands one of the two"
    return _read(connection.url_secret_ref, secrets, f"{where}.urlSecretRef").strip()


def _secrets_of(chosen: KafkaSource | PubSubSource, secrets: Secrets, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for reference in chosen.secret_refs():
        if isinstance(reference, SecretKeyRef):
            found[reference.key] = _read(reference, secrets, where)
            continue
        try:
            found |= secrets.all(reference.name)
        except ConfigError as error:
            raise type(error)(f"{where}: {error}") from error
    return found


def _read(reference: SecretKeyRef, secrets: Secrets, where: str) -> str:
    try:
        return secrets.read(reference.name, reference.key)
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error


def _not_installed(extra: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"spec.source.{extra}: its client is not installed ({error}): pip install 'mailboat[{extra}]'")
