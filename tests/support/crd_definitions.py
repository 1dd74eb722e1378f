"""Waiting for kinds that were just made known to the server."""

from __future__ import annotations

from mailboat_devservers.kubernetes import ApiServer
from support.wait import wait_until


def until_established(server: ApiServer, *which: str) -> None:
    """``which``: the arguments that name the definitions.

    ``kubectl wait`` waits for a condition, but fails at once on a definition so young that it has none: asked again.
    """
    wait_until(
        lambda: server.try_kubectl("wait", "--for=condition=Established", "--timeout=5s", *which),
        60,
        "the definitions to be established",
        met=lambda answer: answer.status == 0,
    )


def until_served(server: ApiServer) -> None:
    """Our kinds: what is established may take a moment more to be found by those who look for it."""
    wait_until(
        lambda: server.try_kubectl("get", "outboxrelays,eventsubscriptions", "--all-namespaces"),
        60,
        "our kinds to be served",
        met=lambda answer: answer.status == 0,
    )
