"""HTTP connections that can be closed reliably, whatever their state.

Closing a TLS connection waits for the peer's close_notify, which a busy API server may send late. An event loop that
ends meanwhile leaks the socket. So the sockets are shut down, which completes the close on this side.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Final

import aiohttp

_CHECKS: Final = 200
_CHECK_EVERY: Final = 0.01
"""Seconds. Only the event loop itself has to run, so a few checks are enough."""


class ClosableConnections:
    """Open connections of one event loop."""

    def __init__(self) -> None:
        self._connectors: list[aiohttp.TCPConnector] = []
        self._sockets: list[socket.socket] = []

    def connector(self, context: ssl.SSLContext) -> aiohttp.TCPConnector:
        """Return a connector for one session. Unlimited: every watch occupies one connection."""
        self._connectors = [each for each in self._connectors if not each.closed]
        self._connectors.append(aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=self._socket))
        return self._connectors[-1]

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        self._sockets = [*self._open, socket.socket(family, kind, protocol)]
        return self._sockets[-1]

    @property
    def _open(self) -> list[socket.socket]:
        return [each for each in self._sockets if each.fileno() >= 0]

    async def close(self) -> None:
        """Close all connectors and the remaining sockets. A session without a connector counts as closed."""
        for connector in self._connectors:
            await connector.close()
        for each in self._open:
            with suppress(OSError):  # not connected yet, or already disconnected
                each.shutdown(socket.SHUT_RDWR)
        for _ in range(_CHECKS):
            if not self._open:
                return
            await asyncio.sleep(_CHECK_EVERY)
