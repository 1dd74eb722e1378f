"""A cluster in a container, by kind. Needs docker or podman."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

from cluster import Cluster
from cluster.folders import abandoned_folders, own_folder
from mailboat_devservers.kubernetes_commands import Commands
from mailboat_devservers.kubernetes_programs import kubernetes_program
from programs import run
from support.wait import wait_until

_FOLDER = "mailboat-e2e-kind-{engine}-"
"""By engine: docker can't delete the clusters of podman."""
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    # As on the node from source: changed Secrets arrive, and killed containers restart, within seconds.
    "syncFrequency": "5s",
    "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
}
_CLUSTER = {
    "apiVersion": "kind.x-k8s.io/v1alpha4",
    "kind": "Cluster",
    "featureGates": {"KubeletCrashLoopBackOffMax": True},
    "kubeadmConfigPatches": [json.dumps(_KUBELET)],
}


class KindCluster(Cluster):
    """One node in a container. If it does not start, its logs are in ``failed``."""

    def __init__(self, engine: str, failed: Path) -> None:
        super().__init__()
        self._engine = engine
        self._end = ExitStack()
        prefix = _FOLDER.format(engine=engine)
        for folder in abandoned_folders(prefix):  # the containers of a killed run still exist
            self._kind(folder, "delete", "cluster")
        self._directory = self._end.enter_context(own_folder(prefix))
        config = self._directory / "kind.yaml"
        config.write_text(json.dumps(_CLUSTER))
        self._end.callback(self._kind, self._directory, "delete", "cluster")
        try:
            # Retained on failure, for its logs.
            self._kind(self._directory, "create", "cluster", "--config", str(config), "--retain")
            self._until_usable()
        except BaseException:
            self.keep_logs(failed)
            self.close()
            raise

    @property
    def commands(self) -> Commands:
        return Commands(_kubeconfig(self._directory), self._directory / "commands")

    def load(self, archive: Path) -> None:
        self._kind(self._directory, "load", "image-archive", str(archive))

    def tag(self, image: str, another: str) -> None:
        self._on_node("ctr", "--namespace", "k8s.io", "images", "tag", "--force", image, another)

    def signal_container(self, container: str, signal: str) -> None:
        self._on_node("ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", signal, container)

    def firewall(self, *arguments: str) -> None:
        self._on_node("iptables", "--wait", *arguments)

    def kill_api_server(self) -> None:
        self._on_node("sh", "-c", "kill -KILL $(pidof kube-apiserver)")

    def logs(self, into: Path) -> None:
        self._kind(self._directory, "export", "logs", str(into))

    def close(self) -> None:
        self._end.close()

    def _until_usable(self) -> None:
        """Wait for node and service account: the ``--wait`` of kind only warns after its time-out."""
        ready = ("wait", "--for=condition=Ready", "node", "--all", "--timeout=5s")
        wait_until(lambda: self.commands.try_kubectl(*ready).status == 0, 180, "the node to be ready")
        account = ("get", "serviceaccount", "default")
        wait_until(lambda: self.commands.try_kubectl(*account).status == 0, 120, "the default service account")

    def _on_node(self, *command: str) -> None:
        run(self._engine, "exec", f"{self._directory.name}-control-plane", *command)

    def _kind(self, folder: Path, *arguments: str) -> None:
        """Run kind for the cluster named by the folder, without its user's kubeconfig."""
        own = {"KIND_EXPERIMENTAL_PROVIDER": self._engine, "KUBECONFIG": str(_kubeconfig(folder))}
        run(str(kubernetes_program("kind")), *arguments, "--name", folder.name, env=own)


def _kubeconfig(folder: Path) -> Path:
    return folder / "kubeconfig"


def container_engine() -> str | None:
    """``docker`` or ``podman``, if one is installed and its engine answers."""
    for engine in ("docker", "podman"):
        # A `docker` that is an alias of podman is reported as podman: kind needs the real name.
        if shutil.which(engine) is not None and engine in _output(engine, "--version") and _output(engine, "info"):
            return engine
    return None


def _output(*command: str) -> str:
    """Output of a command in lower case; empty if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.lower() if done.returncode == 0 else ""
