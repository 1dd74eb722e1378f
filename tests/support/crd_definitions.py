"""Waits for newly created CRDs."""

from __future__ import annotations

from mailboat_devservers.kubernetes import ApiServer
from support.wait import wait_until


def until_established(server: ApiServer, *which: str) -> None:
    """Wait until the CRDs that the arguments select are established.

    ``kubectl wait`` fails at once for a new CRD without conditions, so it is repeated.
    """
    wait_until(
        lambda: server.try_kubectl("wait", "--for=condition=Established", "--timeout=5s", *which),
        60,
        "the definitions to be established",
        met=lambda answer: answer.status == 0,
    )


def until_served(server: ApiServer) -> None:
    """Wait until the API server serves both kinds, which takes a moment after they are established."""
    wait_until(
        lambda: server.try_kubectl("get", "outboxrelays,eventsubscriptions", "--all-namespaces"),
        60,
        "both kinds to be served",
        met=lambda answer: answer.status == 0,
    )
