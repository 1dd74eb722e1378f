"""etcd as one process on the loopback interface: the storage of a Kubernetes API server."""

from __future__ import annotations

from pathlib import Path

from mailboat_devservers.kubernetes_programs import kubernetes_program
from mailboat_devservers.ports import free_port
from mailboat_devservers.processes import Child
from mailboat_devservers.readiness import answers_ok

__all__ = ["EtcdServer", "start_etcd"]


class EtcdServer(Child):
    """One member at ``url``, without TLS: only processes of this machine can connect."""

    def __init__(self, directory: Path, port: int, peer_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        peer_url = f"http://127.0.0.1:{peer_port}"
        options = {
            "name": "etcd",
            "data-dir": str(directory / "data"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"etcd={peer_url}",
            "log-level": "warn",
            # Writes survive a crash of the process without fsync; only a crash of the machine would lose them.
            "unsafe-no-fsync": "true",
        }
        command = [str(kubernetes_program("etcd")), *(f"--{name}={value}" for name, value in options.items())]
        super().__init__(f"etcd on port {port}", command, log=directory / "etcd.log", ready=self._answers)

    def _answers(self) -> bool:
        return answers_ok(f"{self.url}/health")


def start_etcd(directory: Path) -> EtcdServer:
    """Start an empty etcd with its own folder."""
    directory.mkdir(parents=True, exist_ok=True)
    server = EtcdServer(directory, free_port(), free_port())
    server.launch()
    return server
