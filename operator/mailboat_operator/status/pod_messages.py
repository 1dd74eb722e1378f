"""Messages about pods that both kinds of resources share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, pod_of, relay_reports
from mailboat_operator.status.conditions import ConditionResult, no, yes
from mailboat_spec import ConditionType, Reason

NAMED: Final = 5
"""Maximum number of pods named in one message."""


def named(pods: Sequence[str]) -> str:
    """Join the first few names."""
    shown = ", ".join(sorted(pods)[:NAMED])
    return f"{shown} and {len(pods) - NAMED} more" if len(pods) > NAMED else shown


def not_reported(answers: Sequence[Answer]) -> str:
    """Message for the case that no relay answers. If Kubernetes names no cause, it may lie anywhere on the way."""
    if failing := [answer for answer in answers if answer.problem]:
        return f"No relay has reported yet: {'; '.join(f'{each.pod} {each.problem}' for each in failing[:NAMED])}."
    pods = "; ".join(f"{answer.pod}: {answer.error or 'starting'}" for answer in answers[:NAMED]) or "starting"
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
    missed = {
        pod_of(name, namespace)
        for answer, report in relay_reports(answers, relay)
        if not answer.silent
        for name in report.silent
    }
    silent = {answer.pod: "its heartbeats are missing" for answer in answers if answer.pod in missed}
    return silent | {answer.pod: answer.problem or answer.error for answer in answers if answer.silent}


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
    since = "were started before a Secret was referred to, and can't see it"
    if of_applications := [pod.name for pod in lacking if not pod.own]:
        message = f"These pods {since}: restart {named(of_applications)}."
        return no(ConditionType.SECRETS_MOUNTED, Reason.RESTART_NEEDED, message)
    if lacking:
        message = f"These pods {since}; they are being replaced: {named([pod.name for pod in lacking])}."
        return no(ConditionType.SECRETS_MOUNTED, Reason.PROGRESSING, message)
    return yes(
        ConditionType.SECRETS_MOUNTED, Reason.UP_TO_DATE, "Every relay has a place for the Secrets that it needs."
    )
