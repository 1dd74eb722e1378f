"""Status of an EventSubscription, combined from the reports of all its relays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, parse_reason, pod_of, relay_reports
from mailboat_operator.status import display
from mailboat_operator.status.conditions import ConditionResult, no, timestamp, unknown, written, yes
from mailboat_spec import ConditionType, EventSubscription, Reason, State
from mailboat_spec.relay_status import PartitionStatus, RelayStatus, SubscriptionStatus

_UNKNOWN: Final = "unknown"
_SAME_TIME: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class SubscriptionFacts:
    """All facts about a subscription at one moment."""

    name: str
    """namespace/name."""
    generation: int
    before: Mapping[str, Any]
    """The existing status."""
    subscription: EventSubscription | None
    """The form that relays are configured with: the spec, or its last valid form."""
    relay: str
    """namespace/name of the relay that it refers to."""
    relay_exists: bool = True
    problem: str = ""
    """Why the spec is invalid; empty if it is valid."""
    answers: Sequence[Answer] = ()
    """Answers of all relay pods."""
    lacking: Sequence[RelayPod] = ()
    """Running pods without a Secret that this subscription needs."""

    @property
    def pulled(self) -> bool:
        """Whether consumers pull the events. Then one relay reports all partitions, and relays hold none."""
        return self.subscription is not None and self.subscription.spec.sink.pull is not None


@dataclass(frozen=True, slots=True)
class _Reports:
    """Relay reports about one subscription."""

    relays: Sequence[tuple[str, RelayStatus]]
    subscriptions: Sequence[tuple[str, SubscriptionStatus]]
    held: Mapping[int, tuple[str, PartitionStatus | None]]
    """Owner of each partition (empty: none), and its state unless no relay has counted it."""
    silent: Mapping[str, str]
    """Pods that hang or are cut off, each with the reason."""

    @property
    def moving(self) -> list[SubscriptionStatus]:
        """Reports of relays that own partitions; if there are none, all reports."""
        return [each for _, each in self.subscriptions if each.owned] or [each for _, each in self.subscriptions]


def subscription_status(facts: SubscriptionFacts, now: datetime) -> dict[str, Any]:
    reports = _reports(facts)
    status = written(_conditions(facts, reports), facts.before, facts.generation, now)
    if facts.subscription is not None:
        spec = facts.subscription.spec
        status |= {"source": spec.source_name, "sink": spec.sink.kind, "partitionCount": spec.partitions}
    if not reports.subscriptions:
        # No relay reports the subscription. These values hold until a relay changes them; lag grows by itself.
        kept = display.last_known(facts.before, "parked", "dead", "lastError", "lastErrorTime")
        before = facts.before.get("partitions", ())
        last = [{"partition": each["partition"], "pod": each.get("pod", "")} for each in before]
        return {**status, **kept, "lagDisplay": _UNKNOWN, "rate": 0.0, **({"partitions": last} if last else {})}
    return {**status, **_numbers(facts, reports), **_last_error(facts, reports, now)}


def _numbers(facts: SubscriptionFacts, reports: _Reports) -> dict[str, Any]:
    counted = [report for _, report in reports.held.values() if report is not None]
    lags = _lags(facts, reports)
    lag = sum(lags.values())
    bounded = any(report.lag_bounded for report in counted) or len(counted) < len(reports.held)
    numbers: dict[str, Any] = {
        "lag": display.rounded_count(lag),
        "lagDisplay": display.displayed(display.rounded_count(lag), bounded),
        "parked": display.rounded_count(sum(report.parked for report in counted)),
        "dead": max(each.dead for _, each in reports.subscriptions),
        "rate": display.rounded_rate(sum(each.rate for _, each in reports.subscriptions)),
        "partitions": [
            display.partition_row(
                number, "" if facts.pulled else pod, lags[number], report.oldest_age if report else None
            )
            for number, (pod, report) in sorted(reports.held.items())
        ],
        **display.oldest_age(report.oldest_age for report in counted),
    }
    if reports.held and not counted:
        del numbers["lag"]
        numbers["lagDisplay"] = _UNKNOWN
    return numbers


def _last_error(facts: SubscriptionFacts, reports: _Reports, now: datetime) -> dict[str, Any]:
    """The most recent error and its time. While an error lasts, the time is that of its begin."""
    errors = [(each.last_error_age or 0.0, each.last_error) for each in reports.moving if each.last_error]
    if not errors:
        return {"lastError": ""}
    since, error = min(errors)
    text, at = display.displayed_error(error), now - timedelta(seconds=max(since, 0.0))
    before = facts.before.get("lastErrorTime")
    same = bool(before) and facts.before.get("lastError") == text
    if same and (since == 0.0 or abs(at - datetime.fromisoformat(str(before))) < _SAME_TIME):
        return {"lastError": text, "lastErrorTime": before}  # the time is computed again at every poll
    return {"lastError": text, "lastErrorTime": timestamp(at)}


def _lags(facts: SubscriptionFacts, reports: _Reports) -> dict[int, int]:
    """Lag per partition. If no relay counts a partition, keep its last known lag; the sum is a lower bound then."""
    lags = {each["partition"]: each.get("lag", 0) for each in facts.before.get("partitions") or ()}
    lags |= {number: report.lag for number, (_, report) in reports.held.items() if report is not None}
    return {number: lags.get(number, 0) for number in reports.held}


def _reports(facts: SubscriptionFacts) -> _Reports:
    relays = [(answer.pod.name, report) for answer, report in relay_reports(facts.answers, facts.relay)]
    subscriptions = [(pod, found) for pod, report in relays if (found := report.subscription(facts.name)) is not None]
    count = facts.subscription.spec.partitions if facts.subscription is not None else 0
    held: dict[int, tuple[str, PartitionStatus | None]] = dict.fromkeys(range(count), ("", None))
    answering = {answer.pod.name for answer in facts.answers}
    namespace = facts.relay.partition("/")[0]
    for _, each in subscriptions:  # owners from the database, for relays that did not answer in detail
        for number, owner in each.owners.items():
            pod = pod_of(owner, namespace)
            if number in held and pod in answering and not held[number][0]:
                held[number] = (pod, None)
    silent = display.silent_relays(facts.answers, facts.relay)
    for pod, each in sorted(subscriptions, key=lambda item: item[0] not in silent):  # reports of silent pods count less
        for partition in each.owned:
            if partition.partition in held:
                held[partition.partition] = (pod, None if pod in silent else partition)
    for pod, each in subscriptions:
        for orphan in each.orphans if pod not in silent else ():
            owner, counted = held.get(orphan.partition, ("", orphan))
            if counted is None:
                held[orphan.partition] = (owner, orphan)
    return _Reports(relays, subscriptions, held, silent)


def _conditions(facts: SubscriptionFacts, reports: _Reports) -> list[ConditionResult]:
    conditions = [_ready(facts, reports)]
    if facts.subscription is not None and facts.relay_exists:
        conditions += [_paused(facts, reports), display.secrets_mounted(facts.lacking)]
        if reports.subscriptions:
            conditions += [_keys_blocked(reports)]
        if reports.subscriptions and not facts.pulled:
            conditions += [_assigned(reports), _sink_reachable(reports)]
    return conditions


def _ready(facts: SubscriptionFacts, reports: _Reports) -> ConditionResult:
    ready = ConditionType.READY
    if facts.problem:
        return no(ready, Reason.INVALID_SPEC, facts.problem)
    if not facts.relay_exists:
        name = facts.relay.rpartition("/")[2]
        message = f'There is no OutboxRelay "{name}" in this namespace: create it, or correct spec.relayRef.name.'
        return no(ready, Reason.RELAY_NOT_FOUND, message)
    if not reports.relays:
        return _unanswered(facts)
    if not any(report.database_reachable for _, report in reports.relays):
        return _no_database(reports)
    if not reports.subscriptions:
        message = "Relays have not taken the configuration over yet: this resolves by itself."
        return no(ready, Reason.PROGRESSING, message)
    if failed := [each for each in reports.moving if each.state == "Failed"]:
        error = failed[0].last_error or "The relay gave no reason."
        reason = parse_reason(failed[0].reason, Reason.SINK_NOT_SUPPORTED)
        return no(ready, reason, display.with_secret_hint(reason, error))
    paused = _paused(facts, reports)
    if paused.reason is Reason.PAUSED_BY_SPEC:
        return yes(ready, Reason.PAUSED_BY_SPEC, paused.message)
    if paused.reason is Reason.PAUSED_BY_COMMAND:
        return no(ready, Reason.PAUSED_BY_COMMAND, paused.message)
    if facts.pulled:
        return yes(ready, Reason.DELIVERING, "Consumers pull the events, and a relay reports the lag.")
    for condition in (_assigned(reports), _sink_reachable(reports)):
        if condition.status != "True":
            return replace(condition, type=ready)
    return yes(ready, Reason.DELIVERING, "Every partition has a relay, and the destination answers.")


def _unanswered(facts: SubscriptionFacts) -> ConditionResult:
    if not facts.answers:
        message = "No relay runs: see the conditions of the OutboxRelay."
        return no(ConditionType.READY, Reason.NOT_ENOUGH_RELAYS, message)
    if silent := display.silent_relays(facts.answers, facts.relay):
        return unknown(ConditionType.READY, Reason.RELAY_SILENT, display.named_silent(silent))
    return unknown(ConditionType.READY, Reason.STARTING, display.not_reported(facts.answers))


def _no_database(reports: _Reports) -> ConditionResult:
    failure = next((report for _, report in reports.relays if report.message), None)
    if failure is None:
        return no(ConditionType.READY, Reason.DATABASE_UNREACHABLE, "No relay reaches the database.")
    reason = parse_reason(failure.reason, Reason.DATABASE_UNREACHABLE)
    return no(ConditionType.READY, reason, display.with_secret_hint(reason, failure.message))


def _paused(facts: SubscriptionFacts, reports: _Reports) -> ConditionResult:
    paused = ConditionType.PAUSED
    if facts.subscription is not None and facts.subscription.spec.state is State.PAUSED:
        return yes(paused, Reason.PAUSED_BY_SPEC, "Paused: set spec.state to Running to resume.")
    if reports.subscriptions and all(each.state == "Paused" for _, each in reports.subscriptions):
        message = "Paused in the database by a command: run `mailboat resume`."
        return yes(paused, Reason.PAUSED_BY_COMMAND, message)
    return no(paused, Reason.RUNNING, "Not paused.")


def _assigned(reports: _Reports) -> ConditionResult:
    if missing := [number for number, (pod, _) in reports.held.items() if not pod]:
        ids = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        share = f"{len(missing)} of {len(reports.held)} partitions"
        message = f"{share} have no owner ({ids}): relays claim them within seconds."
        return no(ConditionType.ASSIGNED, Reason.PARTITIONS_WITHOUT_OWNER, message)
    if hung := {pod: reports.silent[pod] for pod, _ in reports.held.values() if pod in reports.silent}:
        return no(ConditionType.ASSIGNED, Reason.RELAY_SILENT, display.named_silent(hung))
    return yes(ConditionType.ASSIGNED, Reason.ALL_ASSIGNED, "Every partition is held by a relay.")


def _sink_reachable(reports: _Reports) -> ConditionResult:
    if all(each.sink_reachable is not False for each in reports.moving):
        if any(each.sink_reachable is None for each in reports.moving):
            message = "The relays are connecting to the destination; it has not answered yet."
            return unknown(ConditionType.SINK_REACHABLE, Reason.CONNECTING, message)
        return yes(ConditionType.SINK_REACHABLE, Reason.REACHABLE, "The destination answers.")
    error = next((each.last_error for each in reports.moving if each.sink_reachable is False and each.last_error), "")
    message = "The destination can't be reached; no attempt is counted, and delivery resumes once it can."
    return no(ConditionType.SINK_REACHABLE, Reason.SINK_UNAVAILABLE, f"{message} {error}".strip())


def _keys_blocked(reports: _Reports) -> ConditionResult:
    if any(each.blocked for _, each in reports.subscriptions):
        message = "Keys stand still behind events that used up their attempts: see `mailboat parked`."
        return yes(ConditionType.KEYS_BLOCKED, Reason.ATTEMPTS_EXHAUSTED, message)
    return no(ConditionType.KEYS_BLOCKED, Reason.NOTHING_BLOCKED, "No key stands still.")
