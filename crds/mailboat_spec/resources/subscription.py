"""EventSubscription: one stream of events, with its own source, filter, sink, policy and progress."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, Literal

from pydantic import Field

from mailboat_spec.base import Model
from mailboat_spec.formats import KAFKA_TOPIC, PUBSUB_TOPIC, Form, NonEmpty
from mailboat_spec.references import RelayRef
from mailboat_spec.resources.delivery import Delivery
from mailboat_spec.resources.resource import Resource
from mailboat_spec.resources.sinks import Sink
from mailboat_spec.resources.sources import Idempotency, Source
from mailboat_spec.resources.status import EventSubscriptionStatus
from mailboat_spec.rules import (
    AS_SET,
    Constraint,
    Predicate,
    Refusal,
    Rule,
    absent,
    differs,
    empty,
    equals,
    exactly_one,
    given,
    read,
    rule,
    unchangeable,
    unlike,
)
from mailboat_spec.scalars import Pattern, Timestamp


class State(StrEnum):
    RUNNING = "Running"
    PAUSED = "Paused"


class Format(StrEnum):
    CLOUD_EVENTS = "CloudEvents"
    """CloudEvents 1.0, binary mode: attributes in headers, data untouched."""
    CLOUD_EVENTS_JSON = "CloudEventsJson"
    """CloudEvents 1.0, structured mode: one JSON document."""
    OUTBOX = "Outbox"
    """The data unchanged; headers named like the columns of the outbox."""
    RAW = "Raw"
    """The data unchanged, and the event's id."""


_NONE_OF_ANY: Final = "holds every tag of anyOf, so that nothing would match: remove one of them"


class Tags(Model):
    """Conditions on an event's tags, all of which must hold. Whole tags are compared, case-sensitively."""

    all_of: tuple[NonEmpty, ...] = Field(default=(), max_length=64, json_schema_extra=AS_SET)
    """Tags that an event must all have. Default: none."""
    any_of: tuple[NonEmpty, ...] = Field(default=(), max_length=64, json_schema_extra=AS_SET)
    """Tags of which an event must have at least one. Default: none, no matter."""
    none_of: tuple[NonEmpty, ...] = Field(default=(), max_length=64, json_schema_extra=AS_SET)
    """Tags that an event must not have. Default: none."""

    def wrong_combinations(self) -> Iterator[Refusal]:
        for tag in sorted(set(self.all_of) & set(self.none_of)):
            yield Refusal(("noneOf",), f'"{tag}" is in allOf too, so that nothing would match: remove one of them')
        if self.any_of and set(self.any_of) <= set(self.none_of):
            yield Refusal(("noneOf",), _NONE_OF_ANY)

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        common = "self.allOf.filter(tag, tag in self.noneOf)"
        yield rule(
            f"!has(self.allOf) || !has(self.noneOf) || {common}.size() == 0",
            "holds a tag of allOf, so that nothing would match: remove one of them",
            field="noneOf",
            message_expression=f"'\"' + {common}[0] + '\" is in allOf too, so that nothing would match: "
            "remove one of them'",
        )
        yield rule(
            "!has(self.anyOf) || !has(self.noneOf) || self.anyOf.size() == 0 "
            "|| !self.anyOf.all(tag, tag in self.noneOf)",
            _NONE_OF_ANY,
            field="noneOf",
        )


class Filter(Model):
    """Filter of a subscription: an event matches if every given condition holds."""

    event_types: tuple[Pattern, ...] = Field(default=(), max_length=256, json_schema_extra=AS_SET)
    """Patterns (* any characters, ? exactly one) of which the event's type must match one. Default: none, all types."""
    aggregate_types: tuple[Pattern, ...] = Field(default=(), max_length=256, json_schema_extra=AS_SET)
    """Patterns of which the aggregate's type must match one. Default: none, all aggregates."""
    tags: Tags = Field(default_factory=Tags)
    """Conditions on tags. Default: none."""


def _only_from(choice: str, field: str, example: str) -> tuple[Constraint, ...]:
    """Return the constraints of a field that one kind of start needs, and the others exclude."""
    return (
        Constraint(
            field,
            f"is required with from: {choice}: write {field}: {example}",
            differs("from", choice) | given(field),
            "FieldValueRequired",
        ),
        Constraint(
            field,
            f"is for from: {choice} only: change from or remove it",
            absent(field) | equals("from", choice),
            detailed=f"is for from: {choice} only, not {{from}}: change from or remove it",
        ),
    )


class Start(Model):
    """Start of a new subscription. Has no effect on an existing one."""

    constraints = (*_only_from("Time", "time", '"2026-01-31T12:00:00Z"'), *_only_from("Position", "position", "12345"))

    from_: Literal["Earliest", "Latest", "Time", "Position"] = "Earliest"
    """Earliest (all that the outbox still holds), Latest (only what comes from now on), Time or Position. Default:
    Earliest."""
    time: Timestamp | None = None
    """Time only: events written at or after this time, RFC 3339. Default: none."""
    position: int | None = Field(default=None, strict=True, ge=0, le=2**63 - 1)
    """Position only: events at or after this position (the outbox's column id). Default: none."""


# Constraints of the spec: which fields need or exclude a source, and what dead letters need.
_OUTBOX_ONLY: Final = "is for relayRef only, not for source: remove it"
_SOURCE_ONLY: Final = "is for source only, not for relayRef: remove it"
_OUTBOX: Final = absent("source")
_SOURCE: Final = given("source")

_SOURCE_CONSTRAINTS: Final = (
    *exactly_one(
        "relayRef",
        "source",
        none="needs relayRef: {name: ...} to read an outbox, or source: {kafka: {...}} to read a broker",
        both="has both relayRef and source: remove one of them",
    ),
    Constraint(
        "sink",
        "must be pull: {} with source: the handlers of the application take the events",
        _OUTBOX | given("sink.pull"),
    ),
    *(
        Constraint(field, _SOURCE_ONLY, _SOURCE | absent(field))
        for field in ("runtime", "concurrency", "idempotency", "delivery.deadLetter.stopAt")
    ),
    Constraint(
        "partitions",
        "is for relayRef only, the broker has partitions of its own: remove it",
        _OUTBOX | equals("partitions", 8),
    ),
    Constraint("ordering", "must be Key with source: remove it", _OUTBOX | equals("ordering", "Key")),
    Constraint(
        "start.from",
        "must be Earliest or Latest with a Kafka source",
        absent("source.kafka") | equals("start.from", "Earliest") | equals("start.from", "Latest"),
    ),
    Constraint(
        "start.from",
        "is for relayRef and Kafka only: a Pub/Sub subscription has a start of its own, see its seek command",
        absent("source.pubsub") | equals("start.from", "Earliest"),
    ),
    Constraint(
        "filter.tags",
        "is for relayRef only: messages of a broker have no tags",
        _OUTBOX | empty("filter.tags.allOf") & empty("filter.tags.anyOf") & empty("filter.tags.noneOf"),
    ),
    Constraint(
        "format",
        "is for relayRef only: consumers recognise the format of each message",
        _OUTBOX | equals("format", "CloudEvents"),
    ),
    Constraint("delivery.batchSize", _OUTBOX_ONLY, _OUTBOX | absent("delivery.batchSize")),
    Constraint("delivery.groupBy", _OUTBOX_ONLY, _OUTBOX | empty("delivery.groupBy")),
    Constraint(
        "delivery.groupBy", "is for sink: {pull: {}} only: remove it", empty("delivery.groupBy") | given("sink.pull")
    ),
    Constraint(
        "sink.pull.emitDeadLetters",
        "is for relayRef only, consumers of a broker have delivery.deadLetter: remove it",
        _OUTBOX | absent("sink.pull") | equals("sink.pull.emitDeadLetters", False),
    ),
    Constraint(
        "delivery.onExhausted",
        "must be DeadLetter with source: consumers do not block keys",
        _OUTBOX | equals("delivery.onExhausted", "DeadLetter"),
    ),
)

_DEAD_LETTER: Final = "delivery.deadLetter"
_TOPIC: Final = f"{_DEAD_LETTER}.topic"


def _topic_has(form: Form) -> Predicate:
    def evaluate(spec: object) -> bool:
        try:
            form.check(read(spec, _TOPIC))
        except ValueError:
            return False
        return True

    return Predicate(f"self.{_TOPIC}.size() <= {form.max_length} && {form.condition(f'self.{_TOPIC}')}", evaluate)


_DEAD_LETTER_CONSTRAINTS: Final = (
    Constraint(
        _TOPIC,
        "is required with relayRef: write the topic for dead letters",
        _SOURCE | absent(_DEAD_LETTER) | given(_TOPIC),
        "FieldValueRequired",
    ),
    Constraint(
        _DEAD_LETTER,
        "a sink of kind pull has no topics: remove it (dead letters are kept in mailboat.dead_letters)",
        _SOURCE | absent("sink.pull") | absent(_DEAD_LETTER),
    ),
    *(
        Constraint(
            _TOPIC,
            "is the topic of the sink or source itself: dead letters need another one",
            absent(own.rpartition(".")[0]) | absent(_TOPIC) | unlike(_TOPIC, own),
        )
        for own in ("sink.kafka.topic", "sink.pubsub.topic", "source.kafka.topic")
    ),
    *(
        Constraint(
            _TOPIC, form.message, absent(f"sink.{kind}") & absent(f"source.{kind}") | absent(_TOPIC) | _topic_has(form)
        )
        for kind, form in (("kafka", KAFKA_TOPIC), ("pubsub", PUBSUB_TOPIC))
    ),
)


class EventSubscriptionSpec(Model):
    """Desired state of a subscription."""

    constraints = (
        *_SOURCE_CONSTRAINTS,
        *_DEAD_LETTER_CONSTRAINTS,
        unchangeable(
            "relayRef",
            "progress is kept in the database of that relay; create another EventSubscription instead",
            optional=True,
        ),
        unchangeable(
            "start", "it has no effect on a subscription that exists; create another EventSubscription instead"
        ),
    )

    relay_ref: RelayRef | None = None
    """The OutboxRelay whose outbox is read. Default: none; either this or source is needed."""
    source: Source | None = None
    """The broker that is read instead of an outbox, by consumers that run in the application. Default: none; either
    this or relayRef is needed."""
    runtime: Literal["InProcess"] | None = None
    """Source only: where handlers run: InProcess (in the application, with the Python kit). Default: none, which means
    InProcess with source."""
    concurrency: int | None = Field(default=None, strict=True, ge=1, le=1024)
    """Source only: events of different keys that one process handles at the same time, between 1 and 1024. Default:
    none, which means 32."""
    state: State = State.RUNNING
    """Running or Paused. Default: Running."""
    filter: Filter = Field(default_factory=Filter)
    """Which events belong to it. Default: all."""
    partitions: int = Field(default=8, strict=True, ge=1, le=256)
    """Slices, by hash of the key, that are moved independently of one another, between 1 and 256. Default: 8."""
    ordering: Literal["Key", "None"] = "Key"  # None: a failed event blocks no other
    """What order is kept: Key (per key) or None. Default: Key."""
    start: Start = Field(default_factory=Start)
    """Where a new subscription begins. Default: Earliest."""
    sink: Sink
    """Where events go: exactly one kind of destination. Passwords and other secrets never stand here, each kind refers
    to Secrets of the same namespace instead. The destination can be changed later: progress is kept, and the next
    events go to the new one."""
    format: Format = Format.CLOUD_EVENTS
    """What messages look like: CloudEvents (binary mode), CloudEventsJson (structured mode), Outbox (headers named like
    the columns of the outbox) or Raw. Default: CloudEvents."""
    delivery: Delivery = Field(default_factory=Delivery)
    """How hard to try. Default: 25 attempts, 4 with a pull sink."""
    idempotency: Idempotency | None = None
    """Source only: how consumers recognise events that they handled before. Default: none, a redelivered event is
    handled again."""

    @property
    def batch_size(self) -> int:
        """``delivery.batchSize``, or its default for this kind of sink."""
        return self.delivery.batch_size or (100 if self.sink.pull is not None else 500)

    @property
    def max_attempts(self) -> int:
        """``delivery.maxAttempts``, or its default for this kind of sink."""
        return self.delivery.max_attempts or (4 if self.sink.pull is not None else 25)

    @property
    def handlers(self) -> int:
        """``concurrency``, or its default."""
        return self.concurrency or 32

    @property
    def relay(self) -> str | None:
        """Name of the OutboxRelay; None with a source."""
        return self.relay_ref.name if self.relay_ref is not None else None

    @property
    def source_name(self) -> str:
        """Kind and name of what is read: ``outbox/orders``, ``kafka/orders``, ``pubsub/orders-billing``."""
        if self.source is not None:
            return f"{self.source.kind}/{self.source.stream}"
        return f"outbox/{self.relay}"


class EventSubscription(Resource):
    """One stream of events."""

    kind: Literal["EventSubscription"] = "EventSubscription"
    """Always EventSubscription. Default: EventSubscription."""
    spec: EventSubscriptionSpec
    """What the subscription should be."""
    status: EventSubscriptionStatus | None = None
    """How it is doing. Written by the operator. Default: none."""

    @property
    def group(self) -> str:
        """Kafka consumer group: ``source.kafka.group``, or its default."""
        kafka = self.spec.source.kafka if self.spec.source is not None else None
        return (kafka.group if kafka is not None else None) or f"{self.metadata.namespace}.{self.metadata.name}"

    @property
    def dead_letter_topic(self) -> str | None:
        """``delivery.deadLetter.topic``; with a source, or its default."""
        given = self.spec.delivery.dead_letter.topic if self.spec.delivery.dead_letter is not None else None
        if given is not None or self.spec.source is None:
            return given
        return f"{self.spec.source.stream}.{self.metadata.name}.dead"
