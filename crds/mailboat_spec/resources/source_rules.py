"""Which fields of an EventSubscription need a ``source``, and which exclude one.

Every constraint is defined once for both readers: ``broken`` for the models, ``expression`` for the API server. The API
server fills in defaults before it evaluates rules, so a field with a default can only be refused for another value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mailboat_spec.base import Refusal
from mailboat_spec.cel_rules import Because, Rule

if TYPE_CHECKING:
    from mailboat_spec.resources.subscription import EventSubscriptionSpec


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition on the whole spec."""

    field: str
    message: str
    broken: Callable[[EventSubscriptionSpec], bool]
    expression: str
    """CEL, true if the spec is valid."""
    because: Because = Because.INVALID

    def refusal(self) -> Refusal:
        return Refusal(tuple(self.field.split(".")) if self.field else (), self.message)

    def rule(self) -> Rule:
        return Rule(self.expression, self.message, field=self.field, because=self.because)


_OUTBOX_ONLY: Final = "is for relayRef only, not for source: remove it"
_SOURCE_ONLY: Final = "is for source only, not for relayRef: remove it"

CONSTRAINTS: Final = (
    Constraint(
        "",
        "needs relayRef: {name: ...} to read an outbox, or source: {kafka: {...}} to read a broker",
        lambda spec: spec.relay_ref is None and spec.source is None,
        "has(self.relayRef) || has(self.source)",
        Because.REQUIRED,
    ),
    Constraint(
        "",
        "has both relayRef and source: remove one of them",
        lambda spec: spec.relay_ref is not None and spec.source is not None,
        "!has(self.relayRef) || !has(self.source)",
    ),
    Constraint(
        "sink",
        "must be pull: {} with source: other sinks of a broker's events are not in this release",
        lambda spec: spec.source is not None and spec.sink.pull is None,
        "!has(self.source) || has(self.sink.pull)",
    ),
    Constraint(
        "runtime",
        "must be InProcess: the others are not in this release",
        lambda spec: spec.runtime is not None and spec.runtime != "InProcess",
        "!has(self.runtime) || self.runtime == 'InProcess'",
    ),
    *(
        Constraint(
            name,
            _SOURCE_ONLY,
            lambda spec, attribute=name: spec.source is None and getattr(spec, attribute) is not None,  # type: ignore[misc]
            f"has(self.source) || !has(self.{name})",
        )
        for name in ("runtime", "concurrency", "idempotency")
    ),
    Constraint(
        "delivery.deadLetter.stopAt",
        _SOURCE_ONLY,
        lambda spec: (
            spec.source is None
            and spec.delivery.dead_letter is not None
            and spec.delivery.dead_letter.stop_at is not None
        ),
        "has(self.source) || !has(self.delivery.deadLetter) || !has(self.delivery.deadLetter.stopAt)",
    ),
    Constraint(
        "delivery.deadLetter.topic",
        "is required with relayRef: write the topic for dead letters",
        lambda spec: (
            spec.source is None and spec.delivery.dead_letter is not None and spec.delivery.dead_letter.topic is None
        ),
        "has(self.source) || !has(self.delivery.deadLetter) || has(self.delivery.deadLetter.topic)",
        Because.REQUIRED,
    ),
    Constraint(
        "partitions",
        "is for relayRef only, the broker has partitions of its own: remove it",
        lambda spec: spec.source is not None and spec.partitions != 8,
        "!has(self.source) || self.partitions == 8",
    ),
    Constraint(
        "ordering",
        "must be Key with source: remove it",
        lambda spec: spec.source is not None and spec.ordering != "Key",
        "!has(self.source) || self.ordering == 'Key'",
    ),
    Constraint(
        "start.from",
        "must be Earliest or Latest with a Kafka source",
        lambda spec: spec.source is not None and spec.source.kafka is not None and _starts_inside(spec),
        "!has(self.source) || !has(self.source.kafka) || self.start.from in ['Earliest', 'Latest']",
    ),
    Constraint(
        "start.from",
        "is for relayRef and Kafka only: a Pub/Sub subscription has a start of its own, see its seek command",
        lambda spec: spec.source is not None and spec.source.pubsub is not None and spec.start.from_ != "Earliest",
        "!has(self.source) || !has(self.source.pubsub) || self.start.from == 'Earliest'",
    ),
    Constraint(
        "filter.tags",
        "is for relayRef only: messages of a broker have no tags",
        lambda spec: (
            spec.source is not None
            and bool(spec.filter.tags.all_of or spec.filter.tags.any_of or spec.filter.tags.none_of)
        ),
        "!has(self.source) || !has(self.filter) || !has(self.filter.tags) || "
        + " && ".join(
            f"(!has(self.filter.tags.{each}) || self.filter.tags.{each}.size() == 0)"
            for each in ("allOf", "anyOf", "noneOf")
        ),
    ),
    Constraint(
        "format",
        "is for relayRef only: consumers recognise the format of each message",
        lambda spec: spec.source is not None and spec.format != "CloudEvents",
        "!has(self.source) || self.format == 'CloudEvents'",
    ),
    Constraint(
        "delivery.batchSize",
        _OUTBOX_ONLY,
        lambda spec: spec.source is not None and spec.delivery.batch_size is not None,
        "!has(self.source) || !has(self.delivery.batchSize)",
    ),
    Constraint(
        "delivery.groupBy",
        _OUTBOX_ONLY,
        lambda spec: spec.source is not None and bool(spec.delivery.group_by),
        "!has(self.source) || !has(self.delivery.groupBy) || self.delivery.groupBy.size() == 0",
    ),
    Constraint(
        "sink.pull.emitDeadLetters",
        "is for relayRef only, consumers of a broker have delivery.deadLetter: remove it",
        lambda spec: spec.source is not None and spec.sink.pull is not None and spec.sink.pull.emit_dead_letters,
        "!has(self.source) || !has(self.sink.pull) || !self.sink.pull.emitDeadLetters",
    ),
    Constraint(
        "delivery.onExhausted",
        "must be DeadLetter with source: Block is not in this release",
        lambda spec: spec.source is not None and spec.delivery.on_exhausted != "DeadLetter",
        "!has(self.source) || self.delivery.onExhausted == 'DeadLetter'",
    ),
)


def _starts_inside(spec: EventSubscriptionSpec) -> bool:
    return spec.start.from_ in ("Time", "Position")
