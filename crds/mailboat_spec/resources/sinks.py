"""Sinks: one model per kind of destination, and ``Sink``, which holds exactly one of them.

Settings of a vendor's client are passed on unchanged (``config``). Manifests never contain secrets: every kind has a
reference to a Secret instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field
from pydantic.json_schema import JsonSchemaValue

from mailboat_spec.base import Model
from mailboat_spec.formats import EntryPointName, HostAndPort, KafkaTopic, NonEmpty, PubSubProject, PubSubTopic
from mailboat_spec.redaction import NOT_THE_SECRET_ITSELF, SECRET_NAME, secret_names
from mailboat_spec.references import OptionalSecretRef, SecretKeyRef, UsesSecrets
from mailboat_spec.resources import kafka_settings
from mailboat_spec.rules import AS_SET, FREE_FORM, Refusal, Refused, Rule, ValueCheck, listed, rule, text

_IS_SECRET: Final = (
    "is a secret and must not be written here: put it in a Secret and refer to it by configSecretRef: {name: ...}"
)


class WithoutSecrets(ValueCheck):
    """Annotation for a mapping of settings without secrets."""

    def check(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if secrets := tuple(secret_names(settings)):
            raise Refused(*(Refusal((name,), _IS_SECRET) for name in secrets))
        return settings

    def limits(self) -> JsonSchemaValue:
        return {"maxProperties": 256}

    def rules(self) -> Iterator[Rule]:
        is_secret = f"name.matches({text(SECRET_NAME)}) && !name.matches({text(NOT_THE_SECRET_ITSELF)})"
        yield _of_names(f"!self.exists(name, {is_secret})", is_secret, _IS_SECRET)


@dataclass(frozen=True)
class KafkaSettings(WithoutSecrets):
    """The same for librdkafka settings, limited to an allow-list."""

    allowed: frozenset[str] = kafka_settings.ALLOWED

    def check(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        super().check(settings)
        reasons = {name: kafka_settings.refusal_reason(name, self.allowed) for name in settings}
        if refusals := [Refusal((name,), reason) for name, reason in reasons.items() if reason]:
            raise Refused(*refusals)
        return settings

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        allowed = f"name in {listed(self.allowed)}"
        yield _of_names(f"self.all(name, {allowed})", f"!({allowed})", kafka_settings.NOT_ALLOWED)


def _of_names(expression: str, refused: str, message: str) -> Rule:
    """Return a rule on the names of settings. Its message begins with the first refused name."""
    return rule(
        expression,
        f"one of them {message}",
        reason="FieldValueForbidden",
        message_expression=f"self.filter(name, {refused})[0] + {text(f' {message}')}",
    )


class KafkaServers(UsesSecrets):
    """Address and login of Apache Kafka, or of another server with its protocol. Sinks and sources have them."""

    bootstrap_servers: tuple[HostAndPort, ...] = Field(min_length=1, max_length=64, json_schema_extra=AS_SET)
    """Brokers to ask first, each as host:port."""
    config_secret_ref: OptionalSecretRef = None
    """Secret whose keys are further settings of librdkafka, by the same rules, for example sasl.password. Default:
    none."""


class KafkaSink(KafkaServers):
    """Apache Kafka, or another server with its protocol."""

    topic: KafkaTopic
    """Topic that events are produced to."""
    config: Annotated[Mapping[str, str], KafkaSettings()] = Field(default_factory=dict)
    """Settings of librdkafka, each value in quotes, for example security.protocol: SASL_SSL. Those that run commands,
    read files or weaken guarantees are refused. Secrets go into configSecretRef. Default: none."""


class PubSubService(UsesSecrets):
    """Project, address and login of Google Cloud Pub/Sub. Sinks and sources have them."""

    project: PubSubProject
    """Id of the Google Cloud project."""
    endpoint: HostAndPort | None = None
    """host:port of the service where it is not the global one (a region, an emulator). Default: none, the global one,
    or PUBSUB_EMULATOR_HOST where that is set."""
    credentials_secret_ref: SecretKeyRef | None = None
    """Key of a Secret that holds a service account's JSON key. Default: none, the credentials of the environment
    (workload identity)."""


class PubSubSink(PubSubService):
    """Google Cloud Pub/Sub."""

    topic: PubSubTopic
    """Topic that events are published to, without projects/.../topics/."""


class LogSink(UsesSecrets):
    """JSON lines, for trying things out."""

    path: NonEmpty | None = None
    """File that lines are appended to. Default: none, standard output."""


class CustomSink(UsesSecrets):
    """A third-party sink, found by its entry point."""

    type: EntryPointName
    """Name that the sink's package registers under "mailboat.sinks"."""
    config: Annotated[Mapping[str, Any], WithoutSecrets()] = Field(default_factory=dict, json_schema_extra=FREE_FORM)
    """Whatever that sink takes. Secrets go into configSecretRef. Default: none."""
    config_secret_ref: OptionalSecretRef = None
    """Secret whose content is handed to the sink. Default: none."""


class PullSink(UsesSecrets):
    """No destination: applications pull the events."""

    emit_dead_letters: bool = Field(default=False, strict=True)
    """Whether each dead letter is emitted into the outbox as an event of type mailboat.dead-letter, for another
    subscription to carry to a topic. Default: false."""


_KEEP_ONE: Final = "keep one, and give each other one a subscription of its own"

AnySink = KafkaSink | PubSubSink | LogSink | CustomSink | PullSink


class Sink(Model):
    """Exactly one destination."""

    kafka: KafkaSink | None = None
    """A topic of Apache Kafka, or of anything that speaks its protocol (Redpanda, Event Hubs, ...). Key order is kept
    by Kafka's own partitions: the event's key is the message's key. Default: none."""
    pubsub: PubSubSink | None = None
    """A topic of Google Cloud Pub/Sub. The event's key is the ordering key; subscriptions must have message ordering
    enabled to make use of it. Default: none."""
    log: LogSink | None = None
    """JSON lines on the relay's standard output or in a file, for trying things out; written log: {}. Default: none."""
    custom: CustomSink | None = None
    """A sink of a third party, installed in the relay's image and found by its entry point. Default: none."""
    pull: PullSink | None = None
    """Nowhere: consumers take the events out of the database with mailboat.pull, in the transaction of their effects.
    Relays only report the lag. Written pull: {}. Default: none."""

    def wrong_combinations(self) -> Iterator[Refusal]:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if not given:
            yield Refusal((), self._none_given())
        elif len(given) > 1:
            yield Refusal((), f"has {' and '.join(given)}: {_KEEP_ONE}")

    @classmethod
    def _none_given(cls) -> str:
        return f"needs exactly one of {', '.join(cls.model_fields)} (one without settings is written log: {{}})"

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        given = " || ".join(f"has(self.{kind})" for kind in cls.model_fields)
        yield rule(given, cls._none_given(), reason="FieldValueRequired")
        count = " + ".join(f"(has(self.{kind}) ? 1 : 0)" for kind in cls.model_fields)
        names = " + ".join(f"(has(self.{kind}) ? ' {kind},' : '')" for kind in cls.model_fields)
        yield rule(
            f"{count} <= 1",
            f"has more than one: {_KEEP_ONE}",
            message_expression=f"'has' + {names} + ' more than one: {_KEEP_ONE}'",
        )

    @property
    def kind(self) -> str:
        """YAML name of the chosen sink: ``kafka``, ``pubsub``, ..., ``custom``."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def chosen(self) -> AnySink:
        chosen: AnySink = getattr(self, self.kind)
        return chosen
