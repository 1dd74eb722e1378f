"""The addresses of a one-node cluster: ranges of its own, so that several can run on one machine.

A cable (a pair of virtual interfaces) connects the node with the machine, so that the API server can be asked. No route
leads over it: the machine has none to pods and services, and the node none to anywhere, so that nothing that a story
does can leave it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NETWORKS = 64
_LOCKS = Path("/run/lock")
"""The machine's own, not a user's: interfaces and addresses are the machine's, too."""


@dataclass(frozen=True, slots=True)
class Network:
    """All addresses of the cluster with that number."""

    number: int

    @property
    def cable(self) -> str:
        """The name of the machine's end; the node's is ``eth0``."""
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
def a_free_network() -> Iterator[Network]:
    """A network that no other run on this machine has; ours for as long as the block lasts, however it ends."""
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
