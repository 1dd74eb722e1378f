"""EventSubscription: one stream out of one outbox, with its own filter, sink, policy and progress."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from mailboat_spec.admission import AS_SET, Because, Rule, unchangeable, unless_given
from mailboat_spec.base import Model, Refusal
from mailboat_spec.connections import Connection
from mailboat_spec.delivery import Delivery
from mailboat_spec.durations import Duration, between
from mailboat_spec.patterns import Pattern
from mailboat_spec.references import ConfigMapRef, RelayRef
from mailboat_spec.resource import Resource
from mailboat_spec.sinks import Sink
from mailboat_spec.status import EventSubscriptionStatus
from mailboat_spec.strings import KAFKA_TOPIC, PUBSUB_TOPIC, NonEmpty
from mailboat_spec.timestamps import Timestamp

_TOPIC_FORMS: Final = {"kafka": KAFKA_TOPIC, "pubsub": PUBSUB_TOPIC}
_WITHOUT_TOPICS: Final = frozenset({"http", "postgres", "pull"})


class State(StrEnum):
    """Whether events flow."""

    RUNNING = "Running"
    PAUSED = "Paused"


class Ordering(StrEnum):
    """Order guarantee."""

    KEY = "Key"
    """Events of one key are delivered in order."""
    NONE = "None"
    """No order: a failed event blocks no other."""


class StartFrom(StrEnum):
    """Where a new subscription begins."""

    EARLIEST = "Earliest"
    LATEST = "Latest"
    TIME = "Time"
    POSITION = "Position"


class Format(StrEnum):
    """Message format."""

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

    all_of: tuple[NonEmpty, ...] = Field(
        default=(),
        max_length=64,
        description="Tags that an event must all have. Default: none.",
        json_schema_extra=AS_SET,
    )
    any_of: tuple[NonEmpty, ...] = Field(
        default=(),
        max_length=64,
        description="Tags of which an event must have at least one. Default: none, no matter.",
        json_schema_extra=AS_SET,
    )
    none_of: tuple[NonEmpty, ...] = Field(
        default=(),
        max_length=64,
        description="Tags that an event must not have. Default: none.",
        json_schema_extra=AS_SET,
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        for tag in sorted(set(self.all_of) & set(self.none_of)):
            yield Refusal(("noneOf",), f'"{tag}" is in allOf too, so that nothing would match: remove one of them')
        if self.any_of and set(self.any_of) <= set(self.none_of):
            yield Refusal(("noneOf",), _NONE_OF_ANY)

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        common = "self.allOf.filter(tag, tag in self.noneOf)"
        yield Rule(
            f"!has(self.allOf) || !has(self.noneOf) || {common}.size() == 0",
            "holds a tag of allOf, so that nothing would match: remove one of them",
            field="noneOf",
            message_expression=f"'\"' + {common}[0] + '\" is in allOf too, so that nothing would match: "
            "remove one of them'",
        )
        yield Rule(
            "!has(self.anyOf) || !has(self.noneOf) || self.anyOf.size() == 0 "
            "|| !self.anyOf.all(tag, tag in self.noneOf)",
            _NONE_OF_ANY,
            field="noneOf",
        )


class Filter(Model):
    """Filter of a subscription: an event matches if every given condition holds."""

    event_types: tuple[Pattern, ...] = Field(
        default=(),
        max_length=256,
        description="Patterns (* any characters, ? exactly one) of which the event's type must match one. Default: "
        "none, all types.",
        json_schema_extra=AS_SET,
    )
    aggregate_types: tuple[Pattern, ...] = Field(
        default=(),
        max_length=256,
        description="Patterns of which the aggregate's type must match one. Default: none, all aggregates.",
        json_schema_extra=AS_SET,
    )
    tags: Tags = Field(default_factory=Tags, description="Conditions on tags. Default: none.")


_BEGINNINGS: Final = {
    "time": (StartFrom.TIME, '"2026-01-31T12:00:00Z"'),
    "position": (StartFrom.POSITION, "12345"),
}


class Start(Model):
    """Start of a new subscription. Has no effect on an existing one."""

    from_: StartFrom = Field(
        default=StartFrom.EARLIEST,
        description="Earliest (all that the outbox still holds), Latest (only what comes from now on), Time or "
        "Position. Default: Earliest.",
    )
    time: Timestamp | None = Field(
        default=None, description="Time only: events written at or after this time, RFC 3339. Default: none."
    )
    position: int | None = Field(
        default=None,
        strict=True,
        ge=0,
        le=2**63 - 1,
        description="Position only: events at or after this position (the outbox's column id). Default: none.",
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        for name, (choice, example) in _BEGINNINGS.items():
            value = getattr(self, name)
            if self.from_ is choice and value is None:
                yield Refusal((name,), f"is required with from: {choice}: write {name}: {example}")
            if self.from_ is not choice and value is not None:
                yield Refusal((name,), f"is for from: {choice} only, not {self.from_}: change from or remove it")

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        for name, (choice, example) in _BEGINNINGS.items():
            yield Rule(
                f"self.from != '{choice}' || has(self.{name})",
                f"is required with from: {choice}: write {name}: {example}",
                field=name,
                because=Because.REQUIRED,
            )
            yield Rule(
                unless_given(name, f"self.from == '{choice}'"),
                f"is for from: {choice} only: change from or remove it",
                field=name,
                message_expression=f"'is for from: {choice} only, not ' + self.from + ': change from or remove it'",
            )


class Schemas(Model):
    """Registry of event types with their destinations and payload schemas."""

    config_map_ref: ConfigMapRef = Field(description="ConfigMap with one entry per event type, as JSON Schema.")


class IdempotencyRedis(Connection):
    """The Redis that stores the ids of handled events."""

    schemes: ClassVar[tuple[str, ...]] = ("rediss", "redis")


class Idempotency(Model):
    """Detection of duplicates by consumers of this stream."""

    redis: IdempotencyRedis = Field(description="The Redis that remembers handled events: urlSecretRef, or url.")
    ttl: Annotated[Duration, between("1m", "87600h")] = Field(
        default=Duration.parse("720h"),
        description="How long a handled event is remembered, as a duration between 1m and 87600h. Default: 720h.",
    )


_OWN_TOPIC: Final = "is the sink's own topic: dead letters need another one"


_PULL_ONLY: Final = "is for sink: {pull: {}} only: remove it"


class EventSubscriptionSpec(Model):
    """Desired state of a subscription."""

    relay_ref: RelayRef = Field(description="The OutboxRelay whose outbox is read.")
    state: State = Field(default=State.RUNNING, description="Running or Paused. Default: Running.")
    filter: Filter = Field(default_factory=Filter, description="Which events belong to it. Default: all.")
    partitions: int = Field(
        default=8,
        strict=True,
        ge=1,
        le=256,
        description="Slices, by hash of the key, that are moved independently of one another, between 1 and 256. "
        "Default: 8.",
    )
    ordering: Ordering = Field(
        default=Ordering.KEY, description="What order is kept: Key (per key) or None. Default: Key."
    )
    start: Start = Field(default_factory=Start, description="Where a new subscription begins. Default: Earliest.")
    sink: Sink = Field(
        description="Where events go: exactly one kind of destination. Passwords and other secrets never stand here, "
        "each kind refers to Secrets of the same namespace instead. The destination can be changed later: progress is "
        "kept, and the next events go to the new one."
    )
    format: Format = Field(
        default=Format.CLOUD_EVENTS,
        description="What messages look like: CloudEvents (binary mode), CloudEventsJson (structured mode), Outbox "
        "(headers named like the columns of the outbox) or Raw. Default: CloudEvents.",
    )
    schemas: Schemas | None = Field(
        default=None,
        description="Registry of event types and their schemas. Not in this release. Default: none, nothing is "
        "validated.",
    )
    delivery: Delivery = Field(
        default_factory=Delivery, description="How hard to try. Default: 25 attempts, 4 with a pull sink."
    )
    idempotency: Idempotency | None = Field(
        default=None, description="How consumers recognise duplicates. Not in this release. Default: none."
    )

    @property
    def batch_size(self) -> int:
        """``delivery.batchSize``, or its default for this kind of sink."""
        return self.delivery.batch_size or (100 if self.sink.pull is not None else 500)

    @property
    def max_attempts(self) -> int:
        """``delivery.maxAttempts``, or its default for this kind of sink."""
        return self.delivery.max_attempts or (4 if self.sink.pull is not None else 25)

    def wrong_combinations(self) -> Iterator[Refusal]:
        if self.delivery.group_by and self.sink.pull is None:
            yield Refusal(("delivery", "groupBy"), _PULL_ONLY)
        if self.delivery.dead_letter is None:
            return
        field, topic, kind = ("delivery", "deadLetter", "topic"), self.delivery.dead_letter.topic, self.sink.kind
        if kind in _WITHOUT_TOPICS:
            yield Refusal(
                field[:2],
                f"a sink of kind {kind} has no topics: remove it (dead letters are kept in mailboat.dead_letters)",
            )
        if topic in (getattr(self.sink.chosen, "topic", None), getattr(self.sink.chosen, "stream", None)):
            yield Refusal(field, _OWN_TOPIC)
        elif kind in _TOPIC_FORMS:
            try:
                _TOPIC_FORMS[kind].check(topic)
            except ValueError as error:
                yield Refusal(field, str(error))

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        yield unchangeable(
            "relayRef", "progress is kept in the database of that relay; create another EventSubscription instead"
        )
        yield unchangeable(
            "start", "it has no effect on a subscription that exists; create another EventSubscription instead"
        )
        yield Rule(
            unless_given("delivery.groupBy", "self.delivery.groupBy.size() == 0 || has(self.sink.pull)"),
            _PULL_ONLY,
            field="delivery.groupBy",
        )
        for kind in sorted(_WITHOUT_TOPICS):
            yield Rule(
                f"!has(self.sink.{kind}) || !has(self.delivery.deadLetter)",
                f"a sink of kind {kind} has no topics: remove it (dead letters are kept in mailboat.dead_letters)",
                field="delivery.deadLetter",
            )
        topic = "self.delivery.deadLetter.topic"
        for own in ("kafka.topic", "pubsub.topic", "redis.stream"):
            yield Rule(
                f"!has(self.sink.{own.partition('.')[0]}) || !has(self.delivery.deadLetter) "
                f"|| {topic} != self.sink.{own}",
                _OWN_TOPIC,
                field="delivery.deadLetter.topic",
            )
        for kind, form in _TOPIC_FORMS.items():
            yield Rule(
                f"!has(self.sink.{kind}) || !has(self.delivery.deadLetter) "
                f"|| {topic}.size() <= {form.max_length} && {form.condition(topic)}",
                form.message,
                field="delivery.deadLetter.topic",
            )


class EventSubscription(Resource):
    """One stream out of one outbox."""

    kind: Literal["EventSubscription"] = Field(
        default="EventSubscription", description="Always EventSubscription. Default: EventSubscription."
    )
    spec: EventSubscriptionSpec = Field(description="What the subscription should be.")
    status: EventSubscriptionStatus | None = Field(
        default=None, description="How it is doing. Written by the operator. Default: none."
    )
