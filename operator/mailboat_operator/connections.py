"""HTTP connections that can be closed for certain, whatever state they were left in.

A TLS connection that is closed waits for the other side's farewell. An event loop that ends meanwhile leaves a socket
behind, and how long a busy API server takes to say goodbye nobody knows. So the sockets are known here: they are shut
down, which is the farewell as far as our side is concerned, and waited for until they are gone.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import aiohttp

_LOOKS: Final = 200
_LOOK_EVERY: Final = 0.01
"""Seconds. The event loop has nothing to wait for but itself, so a few looks are enough."""


class Connections:
    """All of one event loop that are open."""

    def __init__(self) -> None:
        self._connectors: list[aiohttp.TCPConnector] = []
        self._sockets: list[socket.socket] = []

    def connector(self, context: ssl.SSLContext) -> aiohttp.TCPConnector:
        """For a session that a library makes. It holds as many as it is asked for: every watch has one to itself."""
        self._connectors = [each for each in self._connectors if not each.closed]
        self._connectors.append(aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=self._socket))
        return self._connectors[-1]

    def session(self, context: ssl.SSLContext, headers: Mapping[str, str]) -> aiohttp.ClientSession:
        """For a library that makes none. Closed by either side."""
        return aiohttp.ClientSession(connector=self.connector(context), headers=headers, trust_env=False)

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        self._sockets = [*self._open, socket.socket(family, kind, protocol)]
        return self._sockets[-1]

    @property
    def _open(self) -> list[socket.socket]:
        return [each for each in self._sockets if each.fileno() >= 0]

    async def close(self) -> None:
        """Every connector, and then what is left of it. Sessions without one count as closed."""
        for connector in self._connectors:
            await connector.close()
        for each in self._open:
            with suppress(OSError):  # it was not connected yet, or is not any more
                each.shutdown(socket.SHUT_RDWR)
        for _ in range(_LOOKS):
            if not self._open:
                return
            await asyncio.sleep(_LOOK_EVERY)
