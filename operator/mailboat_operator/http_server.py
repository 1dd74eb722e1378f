"""The operator's HTTP servers, with bounds on the cost of a client.

Neither the webhook nor the probes require credentials, so every client that reaches the ports can send requests.
Therefore the number of connections is bounded (see ``mailboat_spec.listener``), slow clients are disconnected,
compressed bodies are not decompressed, and ``Memory`` bounds the memory of all requests together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from mailboat_operator.settings import Address
from mailboat_spec.listener import listen

_CONNECTIONS: Final = 128
"""Three API servers keep 25 idle connections each. A TLS connection takes some 300 KiB."""
_KEEPALIVE: Final = 120
"""Seconds for which an idle connection stays open, and the time limit for request headers. The API server closes idle
connections after 90. If this side closed first, a review sent at that moment would be lost, and the pod would start
without its relay."""
_HANDSHAKE_WITHIN: Final = 10.0
_LINGER: Final = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client receives the answer."""
_CLOSE_WITHIN: Final = 3.0


class Busy(Exception):
    """Too many callers are waiting already."""


class Memory:
    """Memory budget shared by callers: each reserves its maximum and waits until that much is free."""

    def __init__(self, size: int, max_waiters: int) -> None:
        self._free = size
        self._max_waiters = max_waiters
        self._waiters = 0
        self._released = asyncio.Event()

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Reserve memory. Raises ``Busy`` if too many callers wait. Small reservations may overtake large ones."""
        if self._free < size:
            await self._wait(size)
        self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._released.set()

    async def _wait(self, size: int) -> None:
        if self._waiters >= self._max_waiters:
            raise Busy
        self._waiters += 1
        try:
            while self._free < size:
                self._released.clear()
                await self._released.wait()
        finally:
            self._waiters -= 1


class BodyTooLarge(Exception):
    """The body is larger than any legitimate one."""


async def read_body(request: web.Request, most: int) -> bytes:
    """Read the body. Raises ``BodyTooLarge``, at once if Content-Length is too large, else at the limit."""
    if (request.content_length or 0) > most:
        raise BodyTooLarge
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most:
            raise BodyTooLarge
    return bytes(body)


class HttpServer:
    """HTTP server for an application, plain or with TLS."""

    def __init__(self, application: web.Application) -> None:
        # No access log: probes and pods cause requests every few seconds.
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_CLOSE_WITHIN,
            keepalive_timeout=_KEEPALIVE,
            lingering_time=_LINGER,
            auto_decompress=False,
        )
        self._server: asyncio.Server | None = None

    async def start(self, address: Address, context: ssl.SSLContext | None = None) -> Address:
        """Listen, and return the address with the actual port. Raises ``OSError``."""
        await self._runner.setup()
        assert self._runner.server is not None
        listener = listen(address.host, address.port, most=_CONNECTIONS)
        host, port, *_ = listener.getsockname()
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            sock=listener,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_WITHIN if context is not None else None,
        )
        return Address(str(host), int(port))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
