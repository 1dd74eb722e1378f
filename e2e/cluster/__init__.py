"""A real Kubernetes cluster with real pods, and the few things that stories do to it from outside.

Two providers: ``kind`` where a container engine runs, and one node from source (``from_source``) where none does. What
stories need beyond this interface they do with kubectl, so that they run the same on both.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mailboat_devservers.kubernetes_commands import CommandFailed, Commands
from support.wait import wait_until

_NO_ANSWER = re.compile(
    r"Unable to connect to the server|TLS handshake timeout|connection refused|connection reset|connection lost"
    r"|unexpected EOF|etcdserver: "
)
"""What kubectl says where nobody has answered, or nobody who could."""


class Cluster(ABC):
    """One running cluster. Leaving its ``with`` block ends it, and nothing of it stays."""

    Failed = CommandFailed
    """What ``kubectl`` and ``helm`` raise; its text is what they said."""

    def __init__(self) -> None:
        self.images: Mapping[str, str] = {}
        """The images that its node knows: their tags by their names."""

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """What it printed, as the cluster's administrator.

        A question is asked once more where it got no answer: an API server that was killed is ready before it has
        caught up with all who ask.
        """
        try:
            return self.commands.kubectl(*arguments, input=input)
        except CommandFailed as failed:
            if "get" not in arguments or "--raw" in arguments or not _NO_ANSWER.search(failed.answer.err):
                raise
        self.until_api_answers()
        return self.commands.kubectl(*arguments, input=input)

    def helm(self, *arguments: str) -> str:
        return self.commands.helm(*arguments)

    def list(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        answer = self.kubectl("--namespace", namespace, "get", kind, f"--selector={selector}", "--output=json")
        items: list[dict[str, Any]] = json.loads(answer)["items"]
        return items

    def until_api_answers(self, timeout: float = 120.0) -> None:
        answers = ("get", "--raw=/readyz", "--request-timeout=5s")
        wait_until(lambda: self.commands.try_kubectl(*answers).status == 0, timeout, "the API server to answer")

    @property
    @abstractmethod
    def commands(self) -> Commands:
        """kubectl and helm, as the cluster's administrator."""

    @abstractmethod
    def load(self, archive: Path) -> None:
        """Make an image known to the node, from a file as ``docker save`` writes it."""

    @abstractmethod
    def tag(self, image: str, another: str) -> None:
        """Give an image that the node has another name as well."""

    @abstractmethod
    def signal_container(self, container: str, signal: str) -> None:
        """Send a signal, for example SIGKILL, to the first process of a container, by its id."""

    @abstractmethod
    def firewall(self, *arguments: str) -> None:
        """Run iptables on the node. What pods send to each other passes its chain FORWARD."""

    @abstractmethod
    def kill_api_server(self) -> None:
        """SIGKILL to kube-apiserver; whatever watches over it starts it again."""

    @abstractmethod
    def logs(self, into: Path) -> None:
        """Copy what the cluster's own programs have logged into a folder."""

    def keep_logs(self, into: Path) -> None:
        """The same of one that did not start: whatever there is of them, and else why there is nothing."""
        into.mkdir(parents=True, exist_ok=True)
        try:
            self.logs(into)
        except Exception as reason:  # the trouble that it had is told by whoever calls, and must not be hidden
            (into / "none.txt").write_text(f"{type(reason).__name__}: {reason}")

    @abstractmethod
    def close(self) -> None:
        """The end of it. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
