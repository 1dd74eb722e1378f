"""What both kinds of resources say about pods, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mailboat_operator.pods import RelayPod
from mailboat_operator.statuses.conditions import Verdict, no, yes
from mailboat_spec import ConditionType, Reason

NAMED: Final = 5
"""Pods that are named in one sentence; nobody reads fifty."""


def named(pods: Sequence[str]) -> str:
    """The first few."""
    shown = ", ".join(sorted(pods)[:NAMED])
    return f"{shown} and {len(pods) - NAMED} more" if len(pods) > NAMED else shown


def not_reported(pods: str) -> str:
    """For when no relay answers the operator. What is wrong may be in the pods, or between them and the operator."""
    return (
        f"No relay has reported yet ({pods}). If it stays so, look at the logs of these pods, and whether a "
        "NetworkPolicy keeps the operator from their port."
    )


def where_to_put_it(reason: Reason, message: str) -> str:
    """A relay's message, with what it can't know: in a cluster nobody writes into its folders."""
    if reason is not Reason.SECRET_NOT_FOUND:
        return message
    return f"{message} In a cluster: create that Secret, in this namespace; relays take it up by themselves."


def secrets_mounted(lacking: Sequence[RelayPod]) -> Verdict:
    """``lacking``: pods that can't see a Secret which they need. Those of our own Deployment are replaced by it."""
    since = "were started before a Secret was referred to, and can't see it"
    if theirs := [pod.name for pod in lacking if not pod.own]:
        message = f"These pods {since}: restart {named(theirs)}."
        return no(ConditionType.SECRETS_MOUNTED, Reason.RESTART_NEEDED, message)
    if lacking:
        message = f"These pods {since}; they are being replaced: {named([pod.name for pod in lacking])}."
        return no(ConditionType.SECRETS_MOUNTED, Reason.PROGRESSING, message)
    return yes(
        ConditionType.SECRETS_MOUNTED, Reason.UP_TO_DATE, "Every relay has a place for the Secrets that it needs."
    )
