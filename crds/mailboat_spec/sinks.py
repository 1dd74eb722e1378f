"""Where events go: one model per kind of destination, and ``Sink``, which holds exactly one of them.

Settings that a vendor's client takes are passed on as they are (``config``). Secrets never stand in a manifest: every
kind has a reference for them instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from mailboat_spec.base import Model, Refusal, Refused
from mailboat_spec.connections import Connection
from mailboat_spec.references import OptionalSecretRef, SecretKeyRef
from mailboat_spec.secrecy import secret_names
from mailboat_spec.strings import (
    EntryPointName,
    HostAndPort,
    KafkaTopic,
    NonEmpty,
    PubSubProject,
    PubSubTopic,
    TableName,
)


def _without_secrets(remedy: str) -> AfterValidator:
    def check(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        message = f"is a secret and must not be written here: put it in a Secret and refer to it by {remedy}"
        if secrets := tuple(secret_names(settings)):
            raise Refused(*(Refusal((name,), message) for name in secrets))
        return settings

    return AfterValidator(check)


class KafkaSink(Model):
    """Apache Kafka, or anything that speaks its protocol."""

    bootstrap_servers: tuple[HostAndPort, ...] = Field(
        min_length=1, max_length=64, description="Brokers to ask first, each as host:port."
    )
    topic: KafkaTopic = Field(description="Topic that events are produced to.")
    config: Annotated[Mapping[str, str], _without_secrets("configSecretRef: {name: ...}")] = Field(
        default_factory=dict,
        description="Settings of librdkafka, each value in quotes, for example security.protocol: SASL_SSL. Secrets go "
        "into configSecretRef. Default: none.",
    )
    config_secret_ref: OptionalSecretRef = Field(
        default=None,
        description="Secret whose keys are further settings of librdkafka, for example sasl.password. Default: none.",
    )


class PubSubSink(Model):
    """Google Cloud Pub/Sub."""

    project: PubSubProject = Field(description="Id of the Google Cloud project.")
    topic: PubSubTopic = Field(description="Topic that events are published to, without projects/.../topics/.")
    endpoint: HostAndPort | None = Field(
        default=None,
        description="host:port of the service where it is not the global one (a region, an emulator). Default: none, "
        "the "
        "global one, or PUBSUB_EMULATOR_HOST where that is set.",
    )
    credentials_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Key of a Secret that holds a service account's JSON key. Default: none, the credentials of the "
        "environment (workload identity).",
    )


class HttpSink(Connection):
    """A webhook: one POST per event."""

    schemes: ClassVar[tuple[str, ...]] = ("https", "http")

    headers: Annotated[Mapping[str, str], _without_secrets("headersSecretRef: {name: ...}")] = Field(
        default_factory=dict,
        description="Headers sent with every request. Secrets (Authorization, ...) go into headersSecretRef. "
        "Default: none.",
    )
    headers_secret_ref: OptionalSecretRef = Field(
        default=None, description="Secret whose keys are further headers, for example Authorization. Default: none."
    )
    signing_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Key of a Secret that holds the secret of the Standard Webhooks signature. Default: none, "
        "unsigned.",
    )


class RedisSink(Connection):
    """A Redis (or Valkey) stream."""

    schemes: ClassVar[tuple[str, ...]] = ("rediss", "redis")

    stream: NonEmpty = Field(description="Key of the stream that events are added to.")
    max_length: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        description="Entries that the stream is trimmed to, approximately. Default: none, never trimmed.",
    )


class PostgresSink(Connection):
    """A table in another Postgres database."""

    schemes: ClassVar[tuple[str, ...]] = ("postgresql", "postgres")

    table: TableName = Field(description="Table that events are inserted into, as schema.table.")


class LogSink(Model):
    """JSON lines, for trying things out."""

    path: NonEmpty | None = Field(
        default=None, description="File that lines are appended to. Default: none, standard output."
    )


class CustomSink(Model):
    """A sink of a third party, found by its entry point."""

    type: EntryPointName = Field(description='Name that the sink\'s package registers under "mailboat.sinks".')
    config: Annotated[Mapping[str, Any], _without_secrets("configSecretRef: {name: ...}")] = Field(
        default_factory=dict,
        description="Whatever that sink takes. Secrets go into configSecretRef. Default: none.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    config_secret_ref: OptionalSecretRef = Field(
        default=None, description="Secret whose content is handed to the sink. Default: none."
    )


AnySink = KafkaSink | PubSubSink | HttpSink | RedisSink | PostgresSink | LogSink | CustomSink


class Sink(Model):
    """Exactly one destination."""

    kafka: KafkaSink | None = Field(default=None, description="Apache Kafka or a compatible broker. Default: none.")
    pubsub: PubSubSink | None = Field(default=None, description="Google Cloud Pub/Sub. Default: none.")
    http: HttpSink | None = Field(default=None, description="A webhook. Default: none.")
    redis: RedisSink | None = Field(default=None, description="A Redis stream. Default: none.")
    postgres: PostgresSink | None = Field(default=None, description="A table in another database. Default: none.")
    log: LogSink | None = Field(default=None, description="JSON lines on standard output or in a file. Default: none.")
    custom: CustomSink | None = Field(
        default=None, description="A sink of a third party, by its entry point. Default: none."
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if not given:
            kinds = ", ".join(type(self).model_fields)
            yield Refusal((), f"needs exactly one of {kinds} (one without settings is written log: {{}})")
        elif len(given) > 1:
            yield Refusal((), f"has {' and '.join(given)}: keep one, and give each other one a subscription of its own")

    @property
    def kind(self) -> str:
        """Which one it is, as YAML spells it: ``kafka``, ``pubsub``, ..., ``custom``."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def chosen(self) -> AnySink:
        """The one that was given."""
        chosen: AnySink = getattr(self, self.kind)
        return chosen
