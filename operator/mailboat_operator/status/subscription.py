"""Status of an EventSubscription, combined from the reports of all its relays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, parse_reason, pod_of, relay_reports
from mailboat_operator.status import display
from mailboat_operator.status.conditions import ConditionResult, no, timestamp, unknown, written, yes
from mailboat_spec import ConditionType, EventSubscription, Reason, State
from mailboat_spec.relay_status import PartitionStatus, RelayStatus, SubscriptionStatus

_UNKNOWN: Final = "unknown"
_SAME_TIME: Final = timedelta(seconds=30)


@dataclass(frozen=True)
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

    @cached_property
    def relay_reports(self) -> list[tuple[str, RelayStatus]]:
        return [(answer.pod.name, report) for answer, report in relay_reports(self.answers, self.relay)]

    @cached_property
    def reports(self) -> list[tuple[str, SubscriptionStatus]]:
        """The relays' reports about this subscription, each with its pod."""
        found = [(pod, report.subscription(self.name)) for pod, report in self.relay_reports]
        return [(pod, report) for pod, report in found if report is not None]

    @property
    def moving(self) -> list[SubscriptionStatus]:
        """Reports of relays that own partitions; if there are none, all reports."""
        return [each for _, each in self.reports if each.owned] or [each for _, each in self.reports]

    @cached_property
    def silent(self) -> Mapping[str, str]:
        """Pods that hang or are cut off, each with the reason."""
        return display.silent_relays(self.answers, self.relay)

    @cached_property
    def held(self) -> Mapping[int, tuple[str, PartitionStatus | None]]:
        """Owner of each partition (empty: none), and its state unless no relay has counted it."""
        count = self.subscription.spec.partitions if self.subscription is not None else 0
        held: dict[int, tuple[str, PartitionStatus | None]] = dict.fromkeys(range(count), ("", None))
        answering = {answer.pod.name for answer in self.answers}
        namespace = self.relay.partition("/")[0]
        for _, each in self.reports:  # owners from the database, for relays that did not answer in detail
            for number, owner in each.owners.items():
                pod = pod_of(owner, namespace)
                if number in held and pod in answering and not held[number][0]:
                    held[number] = (pod, None)
        for pod, each in sorted(self.reports, key=lambda item: item[0] not in self.silent):  # silent pods count less
            for partition in each.owned:
                if partition.partition in held:
                    held[partition.partition] = (pod, None if pod in self.silent else partition)
        for pod, each in self.reports:
            for orphan in each.orphans if pod not in self.silent else ():
                owner, counted = held.get(orphan.partition, ("", orphan))
                if counted is None:
                    held[orphan.partition] = (owner, orphan)
        return held


def subscription_status(facts: SubscriptionFacts, now: datetime) -> dict[str, Any]:
    status = written(_conditions(facts), facts.before, facts.generation, now)
    if facts.subscription is not None:
        spec = facts.subscription.spec
        status |= {"source": spec.source_name, "sink": spec.sink.kind, "partitionCount": spec.partitions}
    if not facts.reports:
        # No relay reports the subscription. These values hold until a relay changes them; lag grows by itself.
        kept = display.last_known(facts.before, "parked", "dead", "lastError", "lastErrorTime")
        before = facts.before.get("partitions", ())
        last = [{"partition": each["partition"], "pod": each.get("pod", "")} for each in before]
        return {**status, **kept, "lagDisplay": _UNKNOWN, "rate": 0.0, **({"partitions": last} if last else {})}
    return {**status, **_numbers(facts), **_last_error(facts, now)}


def _numbers(facts: SubscriptionFacts) -> dict[str, Any]:
    counted = [report for _, report in facts.held.values() if report is not None]
    # If no relay counts a partition, keep its last known lag; the sum is a lower bound then.
    lags = {each["partition"]: each.get("lag", 0) for each in facts.before.get("partitions") or ()}
    lags |= {number: report.lag for number, (_, report) in facts.held.items() if report is not None}
    lag = display.rounded_count(sum(lags.get(number, 0) for number in facts.held))
    bounded = any(report.lag_bounded for report in counted) or len(counted) < len(facts.held)
    numbers: dict[str, Any] = {
        "lag": lag,
        "lagDisplay": display.displayed(lag, bounded),
        "parked": display.rounded_count(sum(report.parked for report in counted)),
        "dead": max(each.dead for _, each in facts.reports),
        "rate": display.rounded_rate(sum(each.rate for _, each in facts.reports)),
        "partitions": [
            display.partition_row(
                number, "" if facts.pulled else pod, lags.get(number, 0), report.oldest_age if report else None
            )
            for number, (pod, report) in sorted(facts.held.items())
        ],
        **display.oldest_age(report.oldest_age for report in counted),
    }
    if facts.held and not counted:
        del numbers["lag"]
        numbers["lagDisplay"] = _UNKNOWN
    return numbers


def _last_error(facts: SubscriptionFacts, now: datetime) -> dict[str, Any]:
    """The most recent error and its time. While an error lasts, the time is that of its begin."""
    errors = [(each.last_error_age or 0.0, each.last_error) for each in facts.moving if each.last_error]
    if not errors:
        return {"lastError": ""}
    since, error = min(errors)
    text, at = display.displayed_error(error), now - timedelta(seconds=max(since, 0.0))
    before = facts.before.get("lastErrorTime")
    same = bool(before) and facts.before.get("lastError") == text
    if same and (since == 0.0 or abs(at - datetime.fromisoformat(str(before))) < _SAME_TIME):
        return {"lastError": text, "lastErrorTime": before}  # the time is computed again at every poll
    return {"lastError": text, "lastErrorTime": timestamp(at)}


def _conditions(facts: SubscriptionFacts) -> list[ConditionResult]:
    conditions = [_ready(facts)]
    if facts.subscription is not None and facts.relay_exists:
        conditions += [_paused(facts), display.secrets_mounted(facts.lacking)]
        if facts.reports:
            conditions.append(_keys_blocked(facts))
        if facts.reports and not facts.pulled:
            conditions += [_assigned(facts), _sink_reachable(facts)]
    return conditions


def _ready(facts: SubscriptionFacts) -> ConditionResult:
    ready = ConditionType.READY
    if facts.problem:
        return no(ready, Reason.INVALID_SPEC, facts.problem)
    if not facts.relay_exists:
        name = facts.relay.rpartition("/")[2]
        message = f'There is no OutboxRelay "{name}" in this namespace: create it, or correct spec.relayRef.name.'
        return no(ready, Reason.RELAY_NOT_FOUND, message)
    if not facts.relay_reports:
        return _unanswered(facts)
    if not any(report.database_reachable for _, report in facts.relay_reports):
        return _no_database(facts)
    if not facts.reports:
        message = "Relays have not taken the configuration over yet: this resolves by itself."
        return no(ready, Reason.PROGRESSING, message)
    if failed := [each for each in facts.moving if each.state == "Failed"]:
        error = failed[0].last_error or "The relay gave no reason."
        reason = parse_reason(failed[0].reason, Reason.SINK_NOT_SUPPORTED)
        return no(ready, reason, display.with_secret_hint(reason, error))
    paused = _paused(facts)
    if paused.reason is Reason.PAUSED_BY_SPEC:
        return yes(ready, Reason.PAUSED_BY_SPEC, paused.message)
    if paused.reason is Reason.PAUSED_BY_COMMAND:
        return no(ready, Reason.PAUSED_BY_COMMAND, paused.message)
    if facts.pulled:
        return yes(ready, Reason.DELIVERING, "Consumers pull the events, and a relay reports the lag.")
    for condition in (_assigned(facts), _sink_reachable(facts)):
        if condition.status != "True":
            return replace(condition, type=ready)
    return yes(ready, Reason.DELIVERING, "Every partition has a relay, and the destination answers.")


def _unanswered(facts: SubscriptionFacts) -> ConditionResult:
    if not facts.answers:
        message = "No relay runs: see the conditions of the OutboxRelay."
        return no(ConditionType.READY, Reason.NOT_ENOUGH_RELAYS, message)
    if facts.silent:
        return unknown(ConditionType.READY, Reason.RELAY_SILENT, display.named_silent(facts.silent))
    return unknown(ConditionType.READY, Reason.STARTING, display.not_reported(facts.answers))


def _no_database(facts: SubscriptionFacts) -> ConditionResult:
    failures = [(report.message, report.reason) for _, report in facts.relay_reports if report.message]
    message, code = failures[0] if failures else ("No relay reaches the database.", "")
    reason = parse_reason(code, Reason.DATABASE_UNREACHABLE)
    return no(ConditionType.READY, reason, display.with_secret_hint(reason, message))


def _paused(facts: SubscriptionFacts) -> ConditionResult:
    paused = ConditionType.PAUSED
    if facts.subscription is not None and facts.subscription.spec.state is State.PAUSED:
        return yes(paused, Reason.PAUSED_BY_SPEC, "Paused: set spec.state to Running to resume.")
    if facts.reports and all(each.state == "Paused" for _, each in facts.reports):
        return yes(paused, Reason.PAUSED_BY_COMMAND, "Paused in the database by a command: run `mailboat resume`.")
    return no(paused, Reason.RUNNING, "Not paused.")


def _assigned(facts: SubscriptionFacts) -> ConditionResult:
    if missing := [number for number, (pod, _) in facts.held.items() if not pod]:
        ids = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        share = f"{len(missing)} of {len(facts.held)} partitions"
        message = f"{share} have no owner ({ids}): relays claim them within seconds."
        return no(ConditionType.ASSIGNED, Reason.PARTITIONS_WITHOUT_OWNER, message)
    if hung := {pod: facts.silent[pod] for pod, _ in facts.held.values() if pod in facts.silent}:
        return no(ConditionType.ASSIGNED, Reason.RELAY_SILENT, display.named_silent(hung))
    return yes(ConditionType.ASSIGNED, Reason.ALL_ASSIGNED, "Every partition is held by a relay.")


def _sink_reachable(facts: SubscriptionFacts) -> ConditionResult:
    if all(each.sink_reachable is not False for each in facts.moving):
        if any(each.sink_reachable is None for each in facts.moving):
            message = "The relays are connecting to the destination; it has not answered yet."
            return unknown(ConditionType.SINK_REACHABLE, Reason.CONNECTING, message)
        return yes(ConditionType.SINK_REACHABLE, Reason.REACHABLE, "The destination answers.")
    error = next((each.last_error for each in facts.moving if each.sink_reachable is False and each.last_error), "")
    message = "The destination can't be reached; no attempt is counted, and delivery resumes once it can."
    return no(ConditionType.SINK_REACHABLE, Reason.SINK_UNAVAILABLE, f"{message} {error}".strip())


def _keys_blocked(facts: SubscriptionFacts) -> ConditionResult:
    if any(each.blocked for _, each in facts.reports):
        message = "Keys stand still behind events that used up their attempts: see `mailboat parked`."
        return yes(ConditionType.KEYS_BLOCKED, Reason.ATTEMPTS_EXHAUSTED, message)
    return no(ConditionType.KEYS_BLOCKED, Reason.NOTHING_BLOCKED, "No key stands still.")
