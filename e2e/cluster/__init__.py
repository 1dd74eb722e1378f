"""A real Kubernetes cluster with real pods, and the operations of the stories on its node.

Two providers: ``kind`` if a container engine runs, else one node from source (``from_source``). Stories use kubectl for
everything beyond this interface, so that they run the same on both.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mailboat_devservers.kubernetes_commands import CommandFailed, Commands
from support.wait import wait_until

_NO_ANSWER = re.compile(
    r"Unable to connect to the server|TLS handshake timeout|connection refused|connection reset|connection lost"
    r"|unexpected EOF|etcdserver: "
)
"""Messages of kubectl about an API server that does not answer."""


class Cluster(ABC):
    """One running cluster. Leaving its ``with`` block ends and removes it."""

    Failed = CommandFailed
    """Error of ``kubectl`` and ``helm``, with their output as its text."""

    def __init__(self) -> None:
        self.images: Mapping[str, str] = {}
        """Tags of the images on its node, by name."""

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl as the cluster's administrator and return its output.

        A ``get`` without an answer is retried once: a restarted API server is ready before it serves all connections.
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
        """Load an image into the node from a file in the format of ``docker save``."""

    @abstractmethod
    def tag(self, image: str, another: str) -> None:
        """Add a tag to an image on the node."""

    @abstractmethod
    def signal_container(self, container: str, signal: str) -> None:
        """Send a signal, for example SIGKILL, to the first process of a container, by its id."""

    @abstractmethod
    def firewall(self, *arguments: str) -> None:
        """Run iptables on the node. Packets between pods pass its chain FORWARD."""

    @abstractmethod
    def kill_api_server(self) -> None:
        """Send SIGKILL to kube-apiserver. The node restarts it."""

    @abstractmethod
    def logs(self, into: Path) -> None:
        """Copy the logs of the cluster's own programs into a folder."""

    def keep_logs(self, into: Path) -> None:
        """Copy the logs of a cluster that did not start. If there are none, write the reason into ``none.txt``."""
        into.mkdir(parents=True, exist_ok=True)
        try:
            self.logs(into)
        except Exception as reason:  # the caller raises the error of the start, which must not be hidden
            (into / "none.txt").write_text(f"{type(reason).__name__}: {reason}")

    @abstractmethod
    def close(self) -> None:
        """End and remove the cluster. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
