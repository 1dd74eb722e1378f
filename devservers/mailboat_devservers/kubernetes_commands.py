"""``kubectl`` and ``helm`` against a test cluster, isolated from the user's own configuration of both."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mailboat_devservers.kubernetes_programs import kubernetes_program

_TIMEOUT = 600.0
"""Seconds after which a command counts as hanging. Commands that wait have their own, shorter timeout."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and output of a command, successful or not. Warnings of the API server are in ``err``."""

    status: int
    out: str
    err: str


class CommandFailed(Exception):
    """A command ended with a status other than 0. The message contains its output."""

    def __init__(self, command: str, answer: Answer) -> None:
        super().__init__(f"`{command}` ended with status {answer.status}:\n{answer.err}{answer.out}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Commands:
    """kubectl and helm with one kubeconfig; ``directory`` holds their caches."""

    kubeconfig: Path
    directory: Path

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl and return its output; raise ``CommandFailed``."""
        return _checked("kubectl", arguments, self.try_kubectl(*arguments, input=input))

    def helm(self, *arguments: str, input: str | None = None) -> str:
        """Run helm and return its output; raise ``CommandFailed``."""
        return _checked("helm", arguments, self.try_helm(*arguments, input=input))

    def try_kubectl(self, *arguments: str, input: str | None = None) -> Answer:
        """Run a kubectl command that may fail."""
        return self._run("kubectl", ["--cache-dir", str(self.directory / "kubectl"), *arguments], input)

    def try_helm(self, *arguments: str, input: str | None = None) -> Answer:
        """Run a helm command that may fail."""
        return self._run("helm", arguments, input)

    def _run(self, program: str, arguments: list[str] | tuple[str, ...], input: str | None) -> Answer:
        own = {
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECTL_KUBERC": "false",
            **{f"HELM_{kind}_HOME": str(self.directory / "helm") for kind in ("CACHE", "CONFIG", "DATA")},
        }
        done = subprocess.run(
            [str(kubernetes_program(program)), *arguments],
            env={**_without_proxies(), **own},
            input=input or "",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)


def _without_proxies() -> dict[str, str]:
    """Return the environment without proxy settings: the cluster is on this machine."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _checked(program: str, arguments: tuple[str, ...], answer: Answer) -> str:
    if answer.status != 0:
        raise CommandFailed(" ".join([program, *arguments]), answer)
    return answer.out
