"""The addresses of a one-node cluster: separate ranges, so that several clusters can run on one machine.

A veth pair connects the node with the machine, so that the machine reaches the API server. The machine has no route to
pods and services, and the node has no default route: no packet of a story leaves the node.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NETWORKS = 64
_LOCKS = Path("/run/lock")
"""One folder for all users, since interfaces and addresses are global to the machine."""


@dataclass(frozen=True, slots=True)
class Network:
    """All addresses of the cluster with that number."""

    number: int

    @property
    def interface(self) -> str:
        """The machine's end of the veth pair; the node's is ``eth0``."""
        return f"mailboat{self.number}"

    @property
    def machine(self) -> str:
        return f"10.199.{self.number}.1"

    @property
    def node(self) -> str:
        return f"10.199.{self.number}.2"

    @property
    def api(self) -> str:
        return f"https://{self.node}:6443"

    @property
    def pods(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def services(self) -> str:
        return f"10.96.{self.number}.0/24"

    @property
    def api_service(self) -> str:
        return f"10.96.{self.number}.1"

    @property
    def dns_service(self) -> str:
        return f"10.96.{self.number}.10"


@contextmanager
def free_network() -> Iterator[Network]:
    """Lock a network that no other run on this machine uses until the end of the block or of the process."""
    _LOCKS.mkdir(parents=True, exist_ok=True)
    for number in range(_NETWORKS):
        with (_LOCKS / f"mailboat-e2e-network-{number}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield Network(number)
            return
    raise RuntimeError(f"all {_NETWORKS} networks for clusters are in use on this machine")
