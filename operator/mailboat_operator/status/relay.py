"""Status of an OutboxRelay: its pods, database and schema, and the problems that keep it from being ready."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from mailboat_operator.kube.client import Object
from mailboat_operator.relays.observation import Observation
from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import parse_reason
from mailboat_operator.resources import deployment_failures
from mailboat_operator.status import display
from mailboat_operator.status.conditions import Blocker, ConditionResult, EventNote, no, unknown, written, yes
from mailboat_spec import ConditionStatus, ConditionType, Reason, Runtime
from mailboat_spec.relay_status import RelayStatus

_DAYS_AHEAD: Final = 7.0


def relay_status(
    observed: Observation, blocker: Blocker | None, deployment: Object | None, now: datetime
) -> dict[str, Any]:
    before = observed.found.get("status") or {}
    alive, ready = sum(pod.alive for pod in observed.pods), len(_ready_pods(observed))
    # With sidecars the application's pods determine the number.
    desired = observed.relay.spec.replicas if observed.relay is not None else None
    database = ", ".join(_databases(observed)) or before.get("database")
    conditions = _conditions(observed, blocker, deployment)
    return {
        **written(conditions, before, observed.found["metadata"].get("generation", 0), now),
        "replicas": alive,
        "readyReplicas": ready,
        "replicasDisplay": f"{ready}/{alive if desired is None else desired}",
        "selector": observed.selector,
        "subscriptions": len(observed.subscriptions),
        **({"database": database} if database else {}),
    }


def _ready_pods(observed: Observation) -> list[RelayPod]:
    """Pods with a ready relay. Deployment pods have a readiness probe; a sidecar has none and counts if it answers."""
    answering = {answer.pod.name for answer in observed.running_answers if answer.report is not None}
    return [pod for pod in observed.pods if pod.alive and (pod.ready if pod.own else pod.name in answering)]


def _conditions(observed: Observation, blocker: Blocker | None, deployment: Object | None) -> list[ConditionResult]:
    conditions = [_ready(observed, blocker, deployment)]
    if reports := observed.reports:
        retention = ConditionType.RETENTION_BLOCKED
        blocked = next((report.retention_blocked for report in reports if report.retention_blocked), None)
        held = next((report.old_snapshot for report in reports if report.old_snapshot), None)
        conditions += [
            _database(observed),
            _schema(reports),
            _remark(retention, blocked, Reason.UNDELIVERED_EVENTS, "Old events are removed in time."),
            _remark(ConditionType.SNAPSHOT_HELD, held, Reason.OLD_SNAPSHOT, "No old snapshot is held."),
        ]
    if observed.relay is not None:
        conditions.append(display.secrets_mounted(observed.lacking(observed.secrets)))
        if observed.relay.spec.runtime is Runtime.SIDECAR:
            conditions.append(_sidecars(observed))
    return conditions


def _ready(observed: Observation, blocker: Blocker | None, deployment: Object | None) -> ConditionResult:
    ready = ConditionType.READY
    uncreated, halted = deployment_failures(deployment)
    if observed.relay is None:
        return no(ready, Reason.INVALID_SPEC, observed.problem)
    if blocker is not None:
        return no(ready, blocker.reason, blocker.message)
    desired = observed.relay.spec.replicas
    if desired == 0:
        return yes(ready, Reason.AVAILABLE, "Scaled to 0 replicas: nothing is delivered until spec.replicas is raised.")
    if not any(pod.alive for pod in observed.pods):
        if observed.relay.spec.runtime is Runtime.SIDECAR:
            name = observed.relay.metadata.name
            message = f'No pod has a relay: label the pods of the application "mailboat.dev/relay: {name}".'
            return no(ready, Reason.NOT_ENOUGH_RELAYS, message)
        if uncreated:
            return no(ready, Reason.NOT_ENOUGH_RELAYS, f"The relay's pods can't be created: {uncreated}")
        return no(ready, Reason.STARTING, "The relay's pods are being created.")
    for answer in observed.running_answers:
        if answer.report is not None and answer.report.config.error:
            still = "continues with the last configuration" if answer.report.relays else "can't use its configuration"
            return no(ready, Reason.INVALID_SPEC, f"Relay {answer.pod.name} {still}: {answer.report.config.error}")
    if not observed.reports:
        return no(ready, Reason.STARTING, _unanswered(observed))
    for condition in (_database(observed), _schema(observed.reports)):
        if condition.status is ConditionStatus.FALSE and condition.reason is not Reason.PARTITIONS_RUN_OUT:
            return no(ready, condition.reason, condition.message)
    if silent := display.silent_relays(observed.running_answers, observed.name):
        return no(ready, Reason.RELAY_SILENT, display.named_silent(silent))
    count = len(_ready_pods(observed))
    if desired is not None and count < desired:
        cause = _problems(observed) or uncreated or "see the pods labelled mailboat.dev/relay"
        message = f"{count} of {desired} relays are ready: {cause.rstrip('.')}."
        return no(ready, Reason.NOT_ENOUGH_RELAYS, message)
    if halted and observed.relay.spec.runtime is Runtime.DEPLOYMENT:
        cause = _problems(observed) or halted
        message = f"New relays do not become ready, the previous ones continue: {cause.rstrip('.')}."
        return no(ready, Reason.NOT_ENOUGH_RELAYS, message)
    return yes(ready, Reason.AVAILABLE, "Relays run and reach the database.")


def _unanswered(observed: Observation) -> str:
    if problems := _problems(observed):
        return f"No relay has reported yet: {problems}."
    if silent := display.silent_relays(observed.running_answers, observed.name):
        return display.named_silent(silent)
    return display.not_reported([answer for answer in observed.running_answers if answer.report is None])


def _problems(observed: Observation) -> str:
    failing = [pod for pod in observed.pods if pod.alive and pod.problem]
    return "; ".join(f"{pod.name} {pod.problem}" for pod in failing[: display.NAMED])


def _database(observed: Observation) -> ConditionResult:
    reachable = ConditionType.DATABASE_REACHABLE
    if any(_reaches(report) for report in observed.reports):
        found = _databases(observed)
        return yes(reachable, Reason.REACHABLE, f"The database answers{': ' if found else ''}{', '.join(found)}.")
    failure = next((report for report in observed.reports if report.message), None)
    if failure is None:
        return no(reachable, Reason.DATABASE_UNREACHABLE, "No relay reaches the database: see the relays' logs.")
    reason = parse_reason(failure.reason, Reason.DATABASE_UNREACHABLE)
    reference = observed.relay.spec.database.url_secret_ref if observed.relay is not None else None
    location = f'key "{reference.key}" of Secret "{reference.name}"' if reference else "spec.database.url"
    if reason is Reason.DATABASE_UNREACHABLE:
        return no(reachable, reason, f"{failure.message} (Is the URL in {location} right, and is the server up?)")
    if reason is Reason.INVALID_SPEC:
        return no(reachable, reason, f"{failure.message} (The URL is in {location}.)")
    return no(reachable, reason, display.with_secret_hint(reason, failure.message))


def _databases(observed: Observation) -> list[str]:
    return sorted({report.database for report in observed.reports if report.database and report.database_reachable})


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
    message = next((report.message for report in connected if report.message), "")
    if not any(report.schema_ready for report in connected):
        if not message:
            return unknown(ready, Reason.STARTING, "The schema is being looked at.")
        return no(ready, Reason.SCHEMA_MISMATCH, message)
    ahead = [report.partitions_ahead_days for report in connected if report.partitions_ahead_days is not None]
    if ahead and min(ahead) < _DAYS_AHEAD:
        cause = message or "See the relays' logs."
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


def _sidecars(observed: Observation) -> ConditionResult:
    if missing := [pod.name for pod in observed.pods if pod.lacks_sidecar]:
        message = (
            f"These pods ask for a sidecar and have none: restart {display.named(missing)}. If they get none again, "
            "the warning at their creation and the operator's log say why."
        )
        return no(ConditionType.SIDECARS_INJECTED, Reason.SIDECAR_MISSING, message)
    return yes(ConditionType.SIDECARS_INJECTED, Reason.UP_TO_DATE, "Every pod that asks for a sidecar has one.")
