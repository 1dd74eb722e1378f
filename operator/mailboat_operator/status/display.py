"""Messages about pods, and rounded numbers, that the statuses share. Rounding is idempotent and monotonic."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, pod_of, relay_reports
from mailboat_operator.status.conditions import ConditionResult, no, yes
from mailboat_spec import ConditionType, Duration, Reason
from mailboat_spec.redaction import redact

NAMED: Final = 5
"""Maximum number of pods named in one message."""
_AGES: Final = tuple(
    [1, 2, 3, 5, 10, 15, 20, 30, 45]
    + [60 * minutes for minutes in (1, 2, 3, 5, 10, 15, 20, 30, 45)]
    + [3600 * hours for hours in (1, 2, 3, 4, 6, 8, 12, 18)]
    + [86400 * days for days in (1, 2, 3, 5, 7, 10, 14, 21, 30, 60, 90, 180, 365)]
)
_EXACT: Final = 100
_ERROR_LIMIT: Final = 256


def named(pods: Sequence[str]) -> str:
    shown = ", ".join(sorted(pods)[:NAMED])
    return f"{shown} and {len(pods) - NAMED} more" if len(pods) > NAMED else shown


def not_reported(answers: Sequence[Answer]) -> str:
    """Message for the case that no relay answers. If Kubernetes names no cause, it may lie anywhere on the way."""
    if failing := [answer.pod for answer in answers if answer.pod.problem]:
        return f"No relay has reported yet: {'; '.join(f'{pod.name} {pod.problem}' for pod in failing[:NAMED])}."
    pods = "; ".join(f"{answer.pod.name}: {answer.error or 'starting'}" for answer in answers[:NAMED]) or "starting"
    return (
        f"No relay has reported yet ({pods}). If it stays so, look at the logs of these pods, and whether a "
        "NetworkPolicy keeps the operator from their port."
    )


def silent_relays(answers: Iterable[Answer], relay: str) -> dict[str, str]:
    """Return the pods that hang or are cut off, each with the reason.

    A pod is silent if it does not answer the operator any more, or if another relay misses its heartbeats: a relay that
    only lost the database still answers.
    """
    namespace = relay.partition("/")[0]
    reports = [report for answer, report in relay_reports(answers, relay) if not answer.silent]
    missed = {pod_of(name, namespace) for report in reports for name in report.silent}
    silent = {answer.pod.name: "its heartbeats are missing" for answer in answers if answer.pod.name in missed}
    return silent | {answer.pod.name: answer.pod.problem or answer.error for answer in answers if answer.silent}


def named_silent(silent: Mapping[str, str]) -> str:
    """Return the message that names silent relays, and what happens next."""
    shown = "; ".join(f"{pod}: {reason}" for pod, reason in sorted(silent.items())[:NAMED])
    return (
        f"Relays do not answer ({shown}). Others take over their partitions within 20 seconds. If it stays so, look at"
        " the node and the logs of these pods, and delete those that hang."
    )


def with_secret_hint(reason: Reason, message: str) -> str:
    """Return a relay's message with a hint for clusters: there, Secrets are resources, not files in a folder."""
    if reason is not Reason.SECRET_NOT_FOUND:
        return message
    return f"{message} In a cluster: create that Secret, in this namespace; relays take it up by themselves."


def secrets_mounted(lacking: Sequence[RelayPod]) -> ConditionResult:
    """Return SecretsMounted. ``lacking``: pods without a needed Secret. The Deployment replaces its own pods."""
    mounted, since = ConditionType.SECRETS_MOUNTED, "were started before a Secret was referred to, and can't see it"
    if of_applications := [pod.name for pod in lacking if not pod.own]:
        message = f"These pods {since}: restart {named(of_applications)}."
        return no(mounted, Reason.RESTART_NEEDED, message)
    if lacking:
        message = f"These pods {since}; they are being replaced: {named([pod.name for pod in lacking])}."
        return no(mounted, Reason.PROGRESSING, message)
    return yes(mounted, Reason.UP_TO_DATE, "Every relay has a place for the Secrets that it needs.")


def rounded_count(count: int) -> int:
    """Exact up to 100, then rounded down to two significant digits."""
    if count <= _EXACT:
        return max(count, 0)
    step: int = 10 ** (len(str(count)) - 2)
    return count // step * step


def rounded_age(seconds: float | None) -> int | None:
    """Round down to the last full step, so that a growing age changes the status ever more rarely."""
    if seconds is None or seconds < _AGES[0]:
        return None
    return _AGES[bisect_right(_AGES, seconds) - 1]


def rounded_rate(rate: float) -> float:
    """Round to two significant digits; less than one event in ten seconds counts as 0."""
    if rate < 0.1 or not math.isfinite(rate):
        return 0.0
    return float(f"{rate:.2g}")


def displayed(count: int, bounded: bool) -> str:
    """Format for kubectl, with a plus sign if counting stopped at a bound."""
    return f"{count}+" if bounded else str(count)


def oldest_age(ages: Iterable[float | None]) -> dict[str, str]:
    """Return the field ``oldestAge``; empty if no event has waited for a second."""
    age = rounded_age(max((each for each in ages if each is not None), default=None))
    return {} if age is None else {"oldestAge": str(Duration.of_seconds(age))}


def last_known(before: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return these fields of the existing status, for the time in which no pod reports."""
    return {name: before[name] for name in names if name in before}


def displayed_error(error: str) -> str:
    return redact(error)[:_ERROR_LIMIT]


def partition_row(number: int, pod: str, lag: int, age: float | None) -> dict[str, Any]:
    return {"partition": number, "pod": pod, "lag": rounded_count(lag), **oldest_age([age])}
