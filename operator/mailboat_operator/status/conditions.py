"""Build conditions from their results, and events from changed conditions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from mailboat_spec import ConditionStatus, ConditionType, Reason
from mailboat_spec.redaction import redact

_MESSAGE_LIMIT: Final = 1024
_TOO_LONG: Final = timedelta(minutes=2)
"""Age from which a start that should resolve by itself is worth an event."""

_HEALTHY_IF_FALSE: Final = frozenset(
    {
        ConditionType.DEAD_LETTERS_STOPPED,
        ConditionType.PAUSED,
        ConditionType.RETENTION_BLOCKED,
        ConditionType.SNAPSHOT_HELD,
        ConditionType.KEYS_BLOCKED,
    }
)
_WITHOUT_EVENTS: Final = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
"""Types that are for tools, not people."""
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


def written(
    conditions: Sequence[ConditionResult], before: Mapping[str, Any], generation: int, now: datetime
) -> dict[str, Any]:
    """Return the conditions for the API, with those of kstatus. An unchanged status keeps its lastTransitionTime."""
    ready = next(each for each in conditions if each.type is ConditionType.READY)
    progress = []
    for type_, reasons in ((ConditionType.STALLED, _STALLED), (ConditionType.RECONCILING, _PROGRESSING)):
        if ready.status is not ConditionStatus.TRUE and ready.reason in reasons:
            progress.append(replace(ready, type=type_, status=ConditionStatus.TRUE))
    last = before.get("conditions") or ()
    since = {(each.get("type"), each.get("status")): each.get("lastTransitionTime") for each in last}
    result = [
        {
            "type": each.type.value,
            "status": each.status.value,
            "reason": each.reason.value,
            "message": _shortened(redact(each.message)),
            "lastTransitionTime": since.get((each.type, each.status)) or timestamp(now),
            "observedGeneration": generation,
        }
        for each in sorted((*conditions, *progress), key=lambda each: list(ConditionType).index(each.type))
    ]
    return {"observedGeneration": generation, "conditions": result}


def timestamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition_events(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[EventNote]:
    """Return one event per changed condition. The steps of a start cause none: Ready summarizes them at the end."""
    old = {condition.get("type"): condition for condition in before}
    changed = [each for each in after if _needs_event(old.get(each["type"]), each)]
    return list(dict.fromkeys(map(_event, changed)))


def overdue(conditions: Iterable[Mapping[str, Any]], now: datetime) -> list[EventNote]:
    """Return an event about a Ready condition whose reason resolves by itself, and which lasts too long for that."""
    ready = next(each for each in conditions if each["type"] == ConditionType.READY)
    if ready["status"] == ConditionStatus.TRUE or ready["reason"] not in _PROGRESSING:
        return []
    since = datetime.fromisoformat(ready["lastTransitionTime"])
    return [EventNote(True, ready["reason"], ready["message"])] if now - since >= _TOO_LONG else []


def _needs_event(last: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    if now["type"] in _WITHOUT_EVENTS:
        return False
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
    healthy = ConditionStatus.FALSE if condition["type"] in _HEALTHY_IF_FALSE else ConditionStatus.TRUE
    return bool(condition.get("status") == healthy)


def _event(condition: Mapping[str, Any]) -> EventNote:
    bad = not _is_healthy(condition) and condition["status"] != ConditionStatus.UNKNOWN
    routine = condition["reason"] in _PROGRESSING or condition["reason"] == Reason.PAUSED_BY_SPEC
    return EventNote(bad and not routine, condition["reason"], condition["message"])


def _shortened(message: str) -> str:
    return message if len(message) <= _MESSAGE_LIMIT else f"{message[: _MESSAGE_LIMIT - 3]}..."
