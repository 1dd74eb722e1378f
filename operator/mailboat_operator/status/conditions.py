"""Build conditions from their results, and events from changed conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from mailboat_spec import ConditionStatus, ConditionType, Reason
from mailboat_spec.redaction import redact

_MESSAGE_LIMIT: Final = 1024
_TOO_LONG: Final = timedelta(minutes=2)
"""Age from which a start that should resolve by itself is worth an event."""

_HEALTHY: Final[Mapping[str, ConditionStatus]] = {
    ConditionType.READY: ConditionStatus.TRUE,
    ConditionType.SOURCE_REACHABLE: ConditionStatus.TRUE,
    ConditionType.IDEMPOTENCY_REACHABLE: ConditionStatus.TRUE,
    ConditionType.IDEMPOTENCY_RELIABLE: ConditionStatus.TRUE,
    ConditionType.DEAD_LETTER_REACHABLE: ConditionStatus.TRUE,
    ConditionType.DEAD_LETTERS_STOPPED: ConditionStatus.FALSE,
    ConditionType.DATABASE_REACHABLE: ConditionStatus.TRUE,
    ConditionType.SCHEMA_READY: ConditionStatus.TRUE,
    ConditionType.SINK_REACHABLE: ConditionStatus.TRUE,
    ConditionType.ASSIGNED: ConditionStatus.TRUE,
    ConditionType.SIDECARS_INJECTED: ConditionStatus.TRUE,
    ConditionType.SECRETS_MOUNTED: ConditionStatus.TRUE,
    ConditionType.PAUSED: ConditionStatus.FALSE,
    ConditionType.RETENTION_BLOCKED: ConditionStatus.FALSE,
    ConditionType.SNAPSHOT_HELD: ConditionStatus.FALSE,
    ConditionType.KEYS_BLOCKED: ConditionStatus.FALSE,
}
"""The healthy status per type. Types not listed here are for tools, not people, and cause no events."""

_STALLED: Final = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.RELAY_NOT_FOUND,
        Reason.NAME_TAKEN,
        Reason.CONFIGURATION_HELD,
        Reason.SECRET_NOT_FOUND,
        Reason.SINK_NOT_SUPPORTED,
        Reason.FOREIGN_DATABASE,
        Reason.SCHEMA_MISMATCH,
        Reason.TOO_MANY_DEAD_LETTERS,
    }
)
"""Reasons that persist until a person acts; kstatus calls that stalled."""
_PROGRESSING: Final = frozenset(
    {
        Reason.PROGRESSING,
        Reason.STARTING,
        Reason.CONNECTING,
        Reason.PARTITIONS_WITHOUT_OWNER,
        Reason.NOT_ENOUGH_RELAYS,
        Reason.NO_CONSUMERS,
    }
)


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """Status, reason and message of one condition type."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a relay can't be brought to its desired state."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class EventNote:
    """A Kubernetes event to be written on a resource."""

    warning: bool
    reason: str
    message: str


def yes(type_: ConditionType, reason: Reason, message: str) -> ConditionResult:
    return ConditionResult(type_, ConditionStatus.TRUE, reason, message)


def no(type_: ConditionType, reason: Reason, message: str) -> ConditionResult:
    return ConditionResult(type_, ConditionStatus.FALSE, reason, message)


def unknown(type_: ConditionType, reason: Reason, message: str) -> ConditionResult:
    return ConditionResult(type_, ConditionStatus.UNKNOWN, reason, message)


def with_progress(conditions: Sequence[ConditionResult]) -> list[ConditionResult]:
    """Add the kstatus conditions ``Reconciling`` or ``Stalled``, by the reason for which Ready is not True."""
    ready = next(each for each in conditions if each.type is ConditionType.READY)
    result = list(conditions)
    if ready.status is not ConditionStatus.TRUE:
        if ready.reason in _STALLED:
            result.append(yes(ConditionType.STALLED, ready.reason, ready.message))
        elif ready.reason in _PROGRESSING:
            result.append(yes(ConditionType.RECONCILING, ready.reason, ready.message))
    return result


def written(
    conditions: Iterable[ConditionResult], before: Iterable[Mapping[str, Any]], generation: int, now: datetime
) -> list[dict[str, Any]]:
    """Return conditions in the form of the API. If the status is unchanged, keep its lastTransitionTime."""
    old = {condition.get("type"): condition for condition in before}
    result = []
    for condition in sorted(conditions, key=lambda each: list(ConditionType).index(each.type)):
        last = old.get(condition.type.value)
        same = last is not None and last.get("status") == condition.status.value
        since = last.get("lastTransitionTime") if last is not None and same else None
        result.append(
            {
                "type": condition.type.value,
                "status": condition.status.value,
                "reason": condition.reason.value,
                "message": _shortened(redact(condition.message)),
                "lastTransitionTime": since or now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "observedGeneration": generation,
            }
        )
    return result


def condition_events(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[EventNote]:
    """Return one event per changed condition. The steps of a start cause none: Ready summarizes them at the end."""
    old = {condition.get("type"): condition for condition in before}
    changes = [(old.get(condition["type"]), condition) for condition in after if condition["type"] in _HEALTHY]
    return list(dict.fromkeys(_event(condition) for last, condition in changes if _needs_event(last, condition)))


def overdue(conditions: Iterable[Mapping[str, Any]], now: datetime) -> list[EventNote]:
    """Return an event about a Ready condition whose reason resolves by itself, and which lasts too long for that."""
    ready = next((each for each in conditions if each["type"] == ConditionType.READY), None)
    if ready is None or ready["status"] == ConditionStatus.TRUE or ready["reason"] not in _PROGRESSING:
        return []
    since = datetime.fromisoformat(ready["lastTransitionTime"])
    return [EventNote(True, ready["reason"], ready["message"])] if now - since >= _TOO_LONG else []


def _needs_event(last: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    if last is not None and all(last.get(field) == now[field] for field in ("status", "reason")):
        return False
    good, ready = _is_healthy(now), now["type"] == ConditionType.READY
    if now["status"] == ConditionStatus.UNKNOWN and not ready:
        return False  # Ready says why nothing is known
    if last is None:
        return ready if good else now["reason"] not in _PROGRESSING
    if good:
        return not _is_healthy(last) and (ready or last.get("reason") not in _PROGRESSING)
    return _is_healthy(last) or now["reason"] not in _PROGRESSING


def _is_healthy(condition: Mapping[str, Any]) -> bool:
    return bool(condition.get("status") == _HEALTHY[condition["type"]])


def _event(condition: Mapping[str, Any]) -> EventNote:
    bad = ConditionStatus.FALSE if _HEALTHY[condition["type"]] == ConditionStatus.TRUE else ConditionStatus.TRUE
    routine = condition["reason"] in _PROGRESSING or condition["reason"] == Reason.PAUSED_BY_SPEC
    return EventNote(condition["status"] == bad and not routine, condition["reason"], condition["message"])


def _shortened(message: str) -> str:
    return message if len(message) <= _MESSAGE_LIMIT else f"{message[: _MESSAGE_LIMIT - 3]}..."
