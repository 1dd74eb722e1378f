"""Constraints of an EventSubscription: which fields need or exclude a ``source``, and what dead letters need."""

from __future__ import annotations

from typing import Final

from mailboat_spec.formats import KAFKA_TOPIC, PUBSUB_TOPIC, Form
from mailboat_spec.rules import (
    Constraint,
    Predicate,
    RuleReason,
    absent,
    empty,
    equals,
    exactly_one,
    given,
    read,
    unlike,
)

_OUTBOX_ONLY: Final = "is for relayRef only, not for source: remove it"
_SOURCE_ONLY: Final = "is for source only, not for relayRef: remove it"
_OUTBOX: Final = absent("source")
_SOURCE: Final = given("source")

SOURCE_CONSTRAINTS: Final = (
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


DEAD_LETTER_CONSTRAINTS: Final = (
    Constraint(
        _TOPIC,
        "is required with relayRef: write the topic for dead letters",
        _SOURCE | absent(_DEAD_LETTER) | given(_TOPIC),
        RuleReason.REQUIRED,
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
