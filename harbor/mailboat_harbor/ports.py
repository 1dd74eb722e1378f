"""Ports on the loopback interface that stay ours across a restart.

A server that is killed and started again must get its old port back. A port from the range that the kernel hands out to
outgoing connections may be taken by any client in between, so we choose from below that range. Other runs of the tests
choose from the same one, and must not get a port whose server has yet to start, or is being restarted: each port is
reserved for as long as the process that chose it lives.
"""

from __future__ import annotations

import random
import socket
import sys

_FIRST, _LAST = 15_000, 31_999
_random = random.SystemRandom()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on, and that nobody else gets from here while we live."""
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
    """Whether the port is ours now. A name in the kernel's own name space, which is gone when we are."""
    if sys.platform != "linux":  # nobody else has such a name space
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
    """Whether something listens on the port by now."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
