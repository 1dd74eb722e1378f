"""Listening sockets with a bound on open connections, for the HTTP servers of the relay and of the operator.

Each connection costs memory before its first request (a TLS connection of asyncio more than 256 KiB), and any client
that reaches the port can open one. Connections are counted from ``accept`` on, so that unfinished TLS handshakes count.
One peer address gets at most half of the connections: a single client can't lock out all others.
"""

import errno
import socket
from typing import Any


class BoundedListener(socket.socket):
    """A listening socket that closes new connections while too many are open."""

    def __init__(self, sock: socket.socket, most: int) -> None:
        """Take over the file descriptor of ``sock``, which is detached."""
        super().__init__(fileno=sock.detach())
        self._most = most
        self._open: list[tuple[socket.socket, str]] = []
        """Accepted connections, each with the address of its peer."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Beyond the limit, raise ``ConnectionAbortedError``, as the kernel may."""
        connection, address = super().accept()
        self._open = [(each, peer) for each, peer in self._open if each.fileno() >= 0]
        peer = str(address[0])
        of_peer = sum(each == peer for _, each in self._open)
        if len(self._open) >= self._most or of_peer >= max(1, self._most // 2):
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections are open")
        self._open.append((connection, peer))
        return connection, address


def listen(host: str | None, port: int, *, most: int) -> BoundedListener:
    """Listen on one address, or on every one if the host is None or ``::``. Raise ``OSError`` on failure."""
    if host is None or host == "::":
        host = "0.0.0.0"
        if socket.has_dualstack_ipv6():
            try:
                sock = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
                return BoundedListener(sock, most)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is compiled in and disabled
                    raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return BoundedListener(socket.create_server((host, port), family=family), most)
