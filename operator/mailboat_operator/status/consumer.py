"""Status of an EventSubscription with a source, combined from the reports of its consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mailboat_operator.relays.reports import ConsumerAnswer, parse_reason
from mailboat_operator.status.conditions import ConditionResult, no, unknown, written, yes
from mailboat_operator.status.display import displayed, named, oldest_age, partition_row, rounded_count
from mailboat_spec import ConditionType, EventSubscription, Reason, State
from mailboat_spec.consumer_report import ConsumedPartition, ConsumerReport, DeadLetterHealth, SourceHealth, StoreHealth
from mailboat_spec.names import CONSUMER_PORT_NAME, SUBSCRIPTION_LABEL
from mailboat_spec.redaction import redact

_ERROR_LIMIT: Final = 256
_MOST_ASSIGNMENTS: Final = 1024


@dataclass(frozen=True, slots=True)
class ConsumerFacts:
    """All facts about a subscription with a source at one moment."""

    generation: int
    before: Mapping[str, Any]
    """The existing status."""
    subscription: EventSubscription | None
    problem: str
    """Why the spec is invalid; empty if it is valid."""
    answers: Sequence[ConsumerAnswer]
    """Answers of all living pods with the label of the subscription."""
    dead: int
    """Dead letters of all consumers, over their restarts."""

    @property
    def reports(self) -> list[ConsumerReport]:
        return [answer.report for answer in self.answers if answer.report is not None]


def _dead(facts: ConsumerFacts) -> int:
    """Return the dead letters that wait on the topic, as each consumer counts them; between two counts the last known
    number. Pub/Sub does not tell it: there, the dead letters that consumers have written."""
    source = facts.subscription.spec.source if facts.subscription is not None else None
    if source is None or source.kafka is None:
        return facts.dead
    health = [report.dead_letters for report in facts.reports if report.dead_letters is not None]
    last_count: int = facts.before.get("dead", 0)
    return max((each.waiting for each in health if each.waiting is not None), default=last_count)


def consumer_status(facts: ConsumerFacts, now: datetime) -> dict[str, Any]:
    status = written(_conditions(facts), facts.before, facts.generation, now)
    status["dead"] = _dead(facts)
    if facts.subscription is not None:
        spec = facts.subscription.spec
        status |= {"source": spec.source_name, "sink": spec.sink.kind}
    if not facts.reports:
        # No consumer reports: keep the last known values.
        for field in ("partitionCount", "lag", "lagDisplay", "oldestAge", "parked", "lastError", "partitions"):
            if field in facts.before:
                status[field] = facts.before[field]
        return status
    return status | _numbers(facts)


def _numbers(facts: ConsumerFacts) -> dict[str, Any]:
    reports = facts.reports
    lag = sum(each.lag for each in reports)
    return {
        "partitionCount": sum(each.source.owned for each in reports if each.source is not None),
        "lag": rounded_count(lag),
        "lagDisplay": displayed(rounded_count(lag), any(each.lag_bounded for each in reports)),
        "parked": rounded_count(sum(each.parked for each in reports)),
        "lastError": redact(next((each.last_error for each in reports if each.last_error), ""))[:_ERROR_LIMIT],
        "partitions": _assignments(facts.answers),
        **oldest_age(each.oldest_age for each in reports),
    }


def _assignments(answers: Sequence[ConsumerAnswer]) -> list[dict[str, Any]]:
    held: dict[int, tuple[str, ConsumedPartition]] = {}
    for answer in answers:
        if answer.report is not None and answer.report.source is not None:
            held |= {each.partition: (answer.pod, each) for each in answer.report.source.partitions}
    return [
        partition_row(number, pod, each.lag or 0, each.oldest_age)
        for number, (pod, each) in sorted(held.items())[:_MOST_ASSIGNMENTS]
    ]


def _conditions(facts: ConsumerFacts) -> list[ConditionResult]:
    conditions = [_paused(facts), *_about_servers(facts.reports)] if facts.subscription is not None else []
    return [_ready(facts, conditions), *conditions]


def _ready(facts: ConsumerFacts, conditions: Sequence[ConditionResult]) -> ConditionResult:
    ready = ConditionType.READY
    if facts.problem:
        return no(ready, Reason.INVALID_SPEC, facts.problem)
    paused = next((each for each in conditions if each.type is ConditionType.PAUSED), None)
    if paused is not None and paused.reason is Reason.PAUSED_BY_SPEC:
        return yes(ready, Reason.PAUSED_BY_SPEC, paused.message)
    if not facts.answers:
        message = f"No pod of this namespace has the label {SUBSCRIPTION_LABEL}: <name of this subscription>."
        return no(ready, Reason.NO_CONSUMERS, message)
    if not facts.reports:
        return unknown(ready, Reason.CONSUMERS_SILENT, _silent(facts.answers))
    for each in conditions:
        if each.type is ConditionType.DEAD_LETTERS_STOPPED and each.status == "True":
            return no(ready, each.reason, each.message)
        if each.type in _NEEDED and each.status == "False":
            return no(ready, each.reason, each.message)
    if all(each.state == "Connecting" for each in facts.reports):
        message = next((each.message for each in facts.reports if each.message), "Consumers are connecting.")
        return no(ready, Reason.PROGRESSING, message)
    return yes(ready, Reason.CONSUMING, f"Consumers run in {len(facts.reports)} pods and reach what they need.")


_NEEDED: Final = frozenset(
    {ConditionType.SOURCE_REACHABLE, ConditionType.IDEMPOTENCY_REACHABLE, ConditionType.DEAD_LETTER_REACHABLE}
)


def _silent(answers: Sequence[ConsumerAnswer]) -> str:
    return (
        f"No consumer answers ({named([answer.pod for answer in answers])}: {answers[0].error}). A pod needs a "
        f"container port named {CONSUMER_PORT_NAME} on which the consumer listens (listen=), and a NetworkPolicy must "
        "not keep the operator from it."
    )


def _paused(facts: ConsumerFacts) -> ConditionResult:
    if facts.subscription is not None and facts.subscription.spec.state is State.PAUSED:
        return yes(ConditionType.PAUSED, Reason.PAUSED_BY_SPEC, "Paused: set spec.state to Running to resume.")
    return no(ConditionType.PAUSED, Reason.RUNNING, "Not paused.")


def _about_servers(reports: Sequence[ConsumerReport]) -> list[ConditionResult]:
    """Return the conditions of the servers that consumers report."""
    sources = [each.source for each in reports if each.source is not None]
    stores = [each.idempotency for each in reports if each.idempotency is not None]
    topics = [each.dead_letters for each in reports if each.dead_letters is not None]
    conditions: list[ConditionResult] = []
    if sources:
        conditions.append(_reachable(ConditionType.SOURCE_REACHABLE, sources, Reason.SOURCE_UNAVAILABLE, "The broker"))
    if stores:
        subject, reason = "The store of handled events", Reason.IDEMPOTENCY_UNAVAILABLE
        conditions += [_reachable(ConditionType.IDEMPOTENCY_REACHABLE, stores, reason, subject), _reliable(stores)]
    if topics:
        subject, reason = "The dead-letter topic", Reason.DEAD_LETTER_UNAVAILABLE
        conditions += [_reachable(ConditionType.DEAD_LETTER_REACHABLE, topics, reason, subject), _stopped(topics)]
    return conditions


def _reachable(
    type_: ConditionType,
    found: Sequence[SourceHealth | StoreHealth | DeadLetterHealth],
    reason: Reason,
    subject: str,
) -> ConditionResult:
    for each in found:
        if not each.reachable:
            message = f"{subject} can't be reached; consumers resume by themselves. {each.error or ''}".strip()
            return no(type_, reason, message)
    return yes(type_, Reason.REACHABLE, f"{subject} answers.")


def _reliable(stores: Sequence[StoreHealth]) -> ConditionResult:
    for each in stores:
        if each.doubt is not None:
            reason = parse_reason(each.doubt, Reason.EVICTS_KEYS)
            message = each.doubt_message or "Handled events may be forgotten."
            return no(ConditionType.IDEMPOTENCY_RELIABLE, reason, message)
    return yes(ConditionType.IDEMPOTENCY_RELIABLE, Reason.RELIABLE, "The store keeps handled events.")


def _stopped(topics: Sequence[DeadLetterHealth]) -> ConditionResult:
    if not any(each.stopped for each in topics):
        return no(ConditionType.DEAD_LETTERS_STOPPED, Reason.RUNNING, "Not stopped.")
    message = (
        "A consumer stopped after too many dead letters in a row (delivery.deadLetter.stopAt): mend the handlers, then "
        "restart the pods."
    )
    return yes(ConditionType.DEAD_LETTERS_STOPPED, Reason.TOO_MANY_DEAD_LETTERS, message)
