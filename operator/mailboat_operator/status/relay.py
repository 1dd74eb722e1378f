"""Status of an OutboxRelay: its pods, database and schema, and the problems that keep it from being ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, parse_reason, relay_reports
from mailboat_operator.status.conditions import Blocker, ConditionResult, EventNote, no, unknown, written, yes
from mailboat_operator.status.display import (
    NAMED,
    named,
    named_silent,
    not_reported,
    secrets_mounted,
    silent_relays,
    with_secret_hint,
)
from mailboat_spec import ConditionStatus, ConditionType, OutboxRelay, Reason, Runtime
from mailboat_spec.relay_status import RelayStatus

_DAYS_AHEAD: Final = 7.0


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """All facts about a relay at one moment."""

    name: str
    """namespace/name."""
    generation: int
    before: Mapping[str, Any]
    relay: OutboxRelay | None
    """None if the spec is invalid, for the reason in ``problem``."""
    problem: str
    blocker: Blocker | None
    """Why the relay can't be brought to its desired state; None if it can."""
    uncreated: str
    """Why the Deployment can't create pods; empty if it can."""
    halted: str
    """Why Kubernetes gave up on a rollout of the Deployment; empty if it did not."""
    pods: Sequence[RelayPod]
    answers: Sequence[Answer]
    subscriptions: int
    lacking: Sequence[RelayPod]
    """Running pods without a Secret that the relay or a subscription needs."""
    selector: str


def relay_status(facts: RelayFacts, now: datetime) -> dict[str, Any]:
    alive = sum(pod.alive for pod in facts.pods)
    # With sidecars the application's pods determine the number.
    desired = facts.relay.spec.replicas if facts.relay is not None else None
    database = _databases(_reports(facts)) or [facts.before.get("database", "")]
    return {
        **written(_conditions(facts), facts.before, facts.generation, now),
        "replicas": alive,
        "readyReplicas": len(_ready_pods(facts)),
        "replicasDisplay": f"{len(_ready_pods(facts))}/{alive if desired is None else desired}",
        "selector": facts.selector,
        "subscriptions": facts.subscriptions,
        **({"database": ", ".join(database)} if any(database) else {}),
    }


def _ready_pods(facts: RelayFacts) -> list[RelayPod]:
    """Pods with a ready relay. Deployment pods have a readiness probe; a sidecar has none and counts if it answers."""
    answering = {answer.pod for answer in facts.answers if answer.report is not None}
    return [pod for pod in facts.pods if pod.alive and (pod.ready if pod.own else pod.name in answering)]


def _reports(facts: RelayFacts) -> list[RelayStatus]:
    return [report for _, report in relay_reports(facts.answers, facts.name)]


def _conditions(facts: RelayFacts) -> list[ConditionResult]:
    reports = _reports(facts)
    conditions = [_ready(facts, reports)]
    if reports:
        retention = ConditionType.RETENTION_BLOCKED
        blocked = next((report.retention_blocked for report in reports if report.retention_blocked), None)
        held = next((report.old_snapshot for report in reports if report.old_snapshot), None)
        conditions += [
            _database(facts, reports),
            _schema(reports),
            _remark(retention, blocked, Reason.UNDELIVERED_EVENTS, "Old events are removed in time."),
            _remark(ConditionType.SNAPSHOT_HELD, held, Reason.OLD_SNAPSHOT, "No old snapshot is held."),
        ]
    if facts.relay is not None:
        conditions.append(secrets_mounted(facts.lacking))
        if facts.relay.spec.runtime is Runtime.SIDECAR:
            conditions.append(_sidecars(facts))
    return conditions


def _ready(facts: RelayFacts, reports: Sequence[RelayStatus]) -> ConditionResult:
    ready = ConditionType.READY
    if facts.relay is None:
        return no(ready, Reason.INVALID_SPEC, facts.problem)
    if facts.blocker is not None:
        return no(ready, facts.blocker.reason, facts.blocker.message)
    desired = facts.relay.spec.replicas
    if desired == 0:
        return yes(ready, Reason.AVAILABLE, "Scaled to 0 replicas: nothing is delivered until spec.replicas is raised.")
    if not any(pod.alive for pod in facts.pods):
        if facts.relay.spec.runtime is Runtime.SIDECAR:
            name = facts.relay.metadata.name
            message = f'No pod has a relay: label the pods of the application "mailboat.dev/relay: {name}".'
            return no(ready, Reason.NOT_ENOUGH_RELAYS, message)
        if facts.uncreated:
            return no(ready, Reason.NOT_ENOUGH_RELAYS, f"The relay's pods can't be created: {facts.uncreated}")
        return no(ready, Reason.STARTING, "The relay's pods are being created.")
    for answer in facts.answers:
        if answer.report is not None and answer.report.config.error:
            still = "continues with the last configuration" if answer.report.relays else "can't use its configuration"
            return no(ready, Reason.INVALID_SPEC, f"Relay {answer.pod} {still}: {answer.report.config.error}")
    if not reports:
        return no(ready, Reason.STARTING, _unanswered(facts))
    for condition in (_database(facts, reports), _schema(reports)):
        if condition.status is ConditionStatus.FALSE and condition.reason is not Reason.PARTITIONS_RUN_OUT:
            return no(ready, condition.reason, condition.message)
    if silent := silent_relays(facts.answers, facts.name):
        return no(ready, Reason.RELAY_SILENT, named_silent(silent))
    count = len(_ready_pods(facts))
    if desired is not None and count < desired:
        cause = _problems(facts) or facts.uncreated or "see the pods labelled mailboat.dev/relay"
        message = f"{count} of {desired} relays are ready: {cause.rstrip('.')}."
        return no(ready, Reason.NOT_ENOUGH_RELAYS, message)
    if facts.halted and facts.relay.spec.runtime is Runtime.DEPLOYMENT:
        cause = _problems(facts) or facts.halted
        message = f"New relays do not become ready, the previous ones continue: {cause.rstrip('.')}."
        return no(ready, Reason.NOT_ENOUGH_RELAYS, message)
    return yes(ready, Reason.AVAILABLE, "Relays run and reach the database.")


def _unanswered(facts: RelayFacts) -> str:
    if problems := _problems(facts):
        return f"No relay has reported yet: {problems}."
    if silent := silent_relays(facts.answers, facts.name):
        return named_silent(silent)
    return not_reported([answer for answer in facts.answers if answer.report is None])


def _problems(facts: RelayFacts) -> str:
    failing = [pod for pod in facts.pods if pod.alive and pod.problem]
    return "; ".join(f"{pod.name} {pod.problem}" for pod in failing[:NAMED])


def _database(facts: RelayFacts, reports: Sequence[RelayStatus]) -> ConditionResult:
    reachable = ConditionType.DATABASE_REACHABLE
    if any(_reaches(report) for report in reports):
        found = _databases(reports)
        return yes(reachable, Reason.REACHABLE, f"The database answers{': ' if found else ''}{', '.join(found)}.")
    failure = next((report for report in reports if report.message), None)
    if failure is None:
        return no(reachable, Reason.DATABASE_UNREACHABLE, "No relay reaches the database: see the relays' logs.")
    reason = parse_reason(failure.reason, Reason.DATABASE_UNREACHABLE)
    location = _url_location(facts.relay)
    if reason is Reason.DATABASE_UNREACHABLE:
        return no(reachable, reason, f"{failure.message} (Is the URL in {location} right, and is the server up?)")
    if reason is Reason.INVALID_SPEC:
        return no(reachable, reason, f"{failure.message} (The URL is in {location}.)")
    return no(reachable, reason, with_secret_hint(reason, failure.message))


def _databases(reports: Sequence[RelayStatus]) -> list[str]:
    return sorted({report.database for report in reports if report.database and report.database_reachable})


def _url_location(relay: OutboxRelay | None) -> str:
    reference = relay.spec.database.url_secret_ref if relay is not None else None
    return "spec.database.url" if reference is None else f'key "{reference.key}" of Secret "{reference.name}"'


def database_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[EventNote]:
    """Return an event if the relays use another database than before: by mistake, it may be an empty one."""
    was, now = before.get("database"), after.get("database")
    if not was or not now or was == now:
        return []
    message = (
        f"The relays use another database: {now}, before it was {was}. Events that were not delivered stay in the other"
        " one. If that was not meant, correct the URL in the Secret."
    )
    return [EventNote(True, Reason.DATABASE_CHANGED, message)]


def _reaches(report: RelayStatus) -> bool:
    """Return whether the relay reached the database. A relay that finds tables missing did, and stays disconnected."""
    return report.database_reachable or report.reason == Reason.SCHEMA_MISMATCH


def _schema(reports: Sequence[RelayStatus]) -> ConditionResult:
    ready = ConditionType.SCHEMA_READY
    connected = [report for report in reports if _reaches(report)]
    if not connected:
        starting = all(report.reason == Reason.STARTING for report in reports)
        reason = Reason.STARTING if starting else Reason.DATABASE_UNREACHABLE
        return unknown(ready, reason, "Nothing is known without the database.")
    if not any(report.schema_ready for report in connected):
        message = next((report.message for report in connected if report.message), "")
        if not message:
            return unknown(ready, Reason.STARTING, "The schema is being looked at.")
        return no(ready, Reason.SCHEMA_MISMATCH, message)
    ahead = [report.partitions_ahead_days for report in connected if report.partitions_ahead_days is not None]
    if ahead and min(ahead) < _DAYS_AHEAD:
        cause = next((report.message for report in connected if report.message), "See the relays' logs.")
        message = f"Less than seven days of time partitions lie ahead; without them writes fail. {cause}"
        return no(ready, Reason.PARTITIONS_RUN_OUT, message)
    if missing_roles := next((report.missing_roles for report in connected if report.missing_roles), ""):
        message = (
            "The outbox is as this version needs it, but the relay's user may not create roles. For applications and"
            f" relays that should have no more rights than they need, an administrator runs:\n{missing_roles}"
        )
        return yes(ready, Reason.ROLES_MISSING, message)
    return yes(ready, Reason.UP_TO_DATE, "The outbox is as this version needs it.")


def _remark(type_: ConditionType, message: str | None, reason: Reason, otherwise: str) -> ConditionResult:
    """Return a condition that is True while a relay reports this message."""
    return yes(type_, reason, message) if message else no(type_, Reason.NOTHING_BLOCKED, otherwise)


def _sidecars(facts: RelayFacts) -> ConditionResult:
    missing = [pod.name for pod in facts.pods if pod.lacks_sidecar]
    if missing:
        message = (
            f"These pods ask for a sidecar and have none: restart {named(missing)}. If they get none again, the "
            "warning at their creation and the operator's log say why."
        )
        return no(ConditionType.SIDECARS_INJECTED, Reason.SIDECAR_MISSING, message)
    return yes(ConditionType.SIDECARS_INJECTED, Reason.UP_TO_DATE, "Every pod that asks for a sidecar has one.")
