"""Ports on the loopback interface that stay reserved across a server's restart.

A server that is killed and started again must get its old port back. A port from the kernel's ephemeral range may be
taken by any client in between, so ports are chosen below that range. Concurrent test runs choose from the same range
and must not get a port whose server has not started yet or is being restarted. Each port is therefore reserved for the
lifetime of the process that chose it.
"""

from __future__ import annotations

import random
import socket
import sys

_FIRST, _LAST = 15_000, 31_999
_random = random.SystemRandom()


def free_port() -> int:
    """Return an unused TCP port on 127.0.0.1, reserved among test runs until this process ends."""
    for _ in range(200):
        port = _random.randint(_FIRST, _LAST)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if _reserve(port):
                return port
    raise RuntimeError(f"found no free port between {_FIRST} and {_LAST} on 127.0.0.1")


def _reserve(port: int) -> bool:
    """Reserve the port by an abstract Unix socket, which ends with this process; return whether it was free."""
    if sys.platform != "linux":  # other systems have no abstract Unix sockets
        return True
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sign.bind(f"\0mailboat-port-{port}")
    except OSError:
        sign.close()
        return False
    sign.detach()  # open until this process ends
    return True


def accepts_connections(port: int) -> bool:
    """Return whether a server listens on the port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
