"""Status of an EventSubscription with a source, combined from the reports of its consumers."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from mailboat_operator.relays.observation import ObservedSubscription
from mailboat_operator.relays.reports import ConsumerAnswer, parse_reason
from mailboat_operator.status import display
from mailboat_operator.status.conditions import ConditionResult, no, unknown, written, yes
from mailboat_spec import ConditionType, EventSubscription, Reason, State
from mailboat_spec.consumer_report import ConsumedPartition, ConsumerReport, DeadLetterHealth, SourceHealth, StoreHealth
from mailboat_spec.names import CONSUMER_PORT_NAME, SUBSCRIPTION_LABEL

_MOST_ASSIGNMENTS: Final = 1024
_NEEDED: Final = frozenset(
    {ConditionType.SOURCE_REACHABLE, ConditionType.IDEMPOTENCY_REACHABLE, ConditionType.DEAD_LETTER_REACHABLE}
)


def consumer_status(
    parsed: ObservedSubscription, answers: Sequence[ConsumerAnswer], dead: int, now: datetime
) -> dict[str, Any]:
    """``answers``: of all living pods with its label. ``dead``: dead letters of all consumers, over their restarts."""
    found, subscription = parsed.found, parsed.subscription
    before: Mapping[str, Any] = found.get("status") or {}
    reports = [answer.report for answer in answers if answer.report is not None]
    conditions = [_paused(subscription), *_about_servers(reports)] if subscription is not None else []
    ready = _ready(parsed.problem, answers, conditions)
    status = written([ready, *conditions], before, found["metadata"].get("generation", 0), now)
    status["dead"] = dead
    if subscription is not None:
        spec = subscription.spec
        status |= {"source": spec.source_name, "sink": spec.sink.kind}
        if spec.source is not None and spec.source.kafka is not None:
            status["dead"] = _waiting(reports, before.get("dead", 0))
    if reports:
        return status | _numbers(answers, reports)
    # No consumer reports: keep the last known values.
    kept = ("partitionCount", "lag", "lagDisplay", "oldestAge", "parked", "lastError", "partitions")
    return status | display.last_known(before, *kept)


def _waiting(reports: Sequence[ConsumerReport], last: int) -> int:
    """Return the dead letters that wait on the topic, as each consumer counts them; between two counts the last known
    number. Pub/Sub reports no such number."""
    health = [report.dead_letters for report in reports if report.dead_letters is not None]
    return max((each.waiting for each in health if each.waiting is not None), default=last)


def _numbers(answers: Sequence[ConsumerAnswer], reports: Sequence[ConsumerReport]) -> dict[str, Any]:
    lag = display.rounded_count(sum(each.lag for each in reports))
    return {
        "partitionCount": sum(each.source.owned for each in reports if each.source is not None),
        "lag": lag,
        "lagDisplay": display.displayed(lag, any(each.lag_bounded for each in reports)),
        "parked": display.rounded_count(sum(each.parked for each in reports)),
        "lastError": display.displayed_error(next((each.last_error for each in reports if each.last_error), "")),
        "partitions": _assignments(answers),
        **display.oldest_age(each.oldest_age for each in reports),
    }


def _assignments(answers: Sequence[ConsumerAnswer]) -> list[dict[str, Any]]:
    held: dict[int, tuple[str, ConsumedPartition]] = {}
    for answer in answers:
        if answer.report is not None and answer.report.source is not None:
            held |= {each.partition: (answer.pod.name, each) for each in answer.report.source.partitions}
    return [
        display.partition_row(number, pod, each.lag or 0, each.oldest_age)
        for number, (pod, each) in sorted(held.items())[:_MOST_ASSIGNMENTS]
    ]


def _ready(problem: str, answers: Sequence[ConsumerAnswer], conditions: Sequence[ConditionResult]) -> ConditionResult:
    ready = ConditionType.READY
    reports = [answer.report for answer in answers if answer.report is not None]
    if problem:
        return no(ready, Reason.INVALID_SPEC, problem)
    if conditions[0].reason is Reason.PAUSED_BY_SPEC:
        return yes(ready, Reason.PAUSED_BY_SPEC, conditions[0].message)
    if not answers:
        message = f"No pod of this namespace has the label {SUBSCRIPTION_LABEL}: <name of this subscription>."
        return no(ready, Reason.NO_CONSUMERS, message)
    if not reports:
        pods = display.named([answer.pod.name for answer in answers])
        message = (
            f"No consumer answers ({pods}: {answers[0].error}). A pod needs a container port named "
            f"{CONSUMER_PORT_NAME} on which the consumer listens (listen=), and a NetworkPolicy must not keep the "
            "operator from it."
        )
        return unknown(ready, Reason.CONSUMERS_SILENT, message)
    for each in conditions:
        stopped = each.type is ConditionType.DEAD_LETTERS_STOPPED and each.status == "True"
        if stopped or (each.type in _NEEDED and each.status == "False"):
            return no(ready, each.reason, each.message)
    if all(each.state == "Connecting" for each in reports):
        message = next((each.message for each in reports if each.message), "Consumers are connecting.")
        return no(ready, Reason.PROGRESSING, message)
    return yes(ready, Reason.CONSUMING, f"Consumers run in {len(reports)} pods and reach what they need.")


def _paused(subscription: EventSubscription) -> ConditionResult:
    if subscription.spec.state is State.PAUSED:
        return yes(ConditionType.PAUSED, Reason.PAUSED_BY_SPEC, "Paused: set spec.state to Running to resume.")
    return no(ConditionType.PAUSED, Reason.RUNNING, "Not paused.")


def _about_servers(reports: Sequence[ConsumerReport]) -> list[ConditionResult]:
    """Return the conditions of the servers that consumers report."""
    conditions: list[ConditionResult] = []
    if sources := [each.source for each in reports if each.source is not None]:
        conditions.append(_reachable(ConditionType.SOURCE_REACHABLE, sources, Reason.SOURCE_UNAVAILABLE, "The broker"))
    if stores := [each.idempotency for each in reports if each.idempotency is not None]:
        subject, reason = "The store of handled events", Reason.IDEMPOTENCY_UNAVAILABLE
        conditions += [_reachable(ConditionType.IDEMPOTENCY_REACHABLE, stores, reason, subject), _reliable(stores)]
    if topics := [each.dead_letters for each in reports if each.dead_letters is not None]:
        subject, reason = "The dead-letter topic", Reason.DEAD_LETTER_UNAVAILABLE
        conditions += [_reachable(ConditionType.DEAD_LETTER_REACHABLE, topics, reason, subject), _stopped(topics)]
    return conditions


def _reachable(
    type_: ConditionType, found: Sequence[SourceHealth | StoreHealth | DeadLetterHealth], reason: Reason, subject: str
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
        "A consumer stopped after too many dead letters in a row (delivery.deadLetter.stopAt): correct the handlers, "
        "then restart the pods."
    )
    return yes(ConditionType.DEAD_LETTERS_STOPPED, Reason.TOO_MANY_DEAD_LETTERS, message)
