"""HTTP sessions for somebody else, that can be closed for certain, whatever state he left them in.

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
        self._sessions: list[aiohttp.ClientSession] = []
        self._sockets: list[socket.socket] = []

    def session(self, context: ssl.SSLContext, headers: Mapping[str, str]) -> aiohttp.ClientSession:
        """A new one."""
        self._sessions = [each for each in self._sessions if not each.closed]
        connector = aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=self._socket)
        self._sessions.append(aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False))
        return self._sessions[-1]

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        self._sockets = [*self._open, socket.socket(family, kind, protocol)]
        return self._sockets[-1]

    @property
    def _open(self) -> list[socket.socket]:
        return [each for each in self._sockets if each.fileno() >= 0]

    async def close(self) -> None:
        """Every session, and then what is left of it."""
        for session in self._sessions:
            await session.close()
        for each in self._open:
            with suppress(OSError):  # it was not connected yet, or is not any more
                each.shutdown(socket.SHUT_RDWR)
        for _ in range(_LOOKS):
            if not self._open:
                return
            await asyncio.sleep(_LOOK_EVERY)
