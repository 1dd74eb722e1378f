"""The operator's HTTP servers, and the bounds of what a client may cost.

Whoever reaches the operator's ports can send requests: neither the webhook nor the probes ask for credentials. So the
number of connections is bounded (see ``mailboat_spec.listener``), a client that is slow is cut off, compressed bodies
are not decompressed, and ``Memory`` bounds what all requests together may occupy.
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
_KEPT_OPEN: Final = 120
"""Seconds for which a connection without a request is kept. The API server itself ends it after 90: a review that is
sent just as we end it would be lost, and the pod would start without its relay. Headers must be in within that time."""
_HANDSHAKE_WITHIN: Final = 10.0
_LINGER: Final = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client sees the answer."""
_CLOSE_WITHIN: Final = 3.0


class Busy(Exception):
    """Too many callers wait already."""


class Memory:
    """An amount of memory that callers share: each reserves what it may need, and waits until that is free."""

    def __init__(self, size: int, most_waiting: int) -> None:
        self._free = size
        self._most_waiting = most_waiting
        self._waiting = 0
        self._released = asyncio.Event()

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Raises ``Busy`` instead of becoming one waiting caller too many. A small one may overtake a large one."""
        if self._free < size:
            await self._wait(size)
        self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._released.set()

    async def _wait(self, size: int) -> None:
        if self._waiting >= self._most_waiting:
            raise Busy
        self._waiting += 1
        try:
            while self._free < size:
                self._released.clear()
                await self._released.wait()
        finally:
            self._waiting -= 1


class BodyTooLarge(Exception):
    """The body is larger than any that is needed."""


async def read_body(request: web.Request, most: int) -> bytes:
    """The body. Raises ``BodyTooLarge``: at once if the client says how long it is, else as soon as it is seen."""
    if (request.content_length or 0) > most:
        raise BodyTooLarge
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most:
            raise BodyTooLarge
    return bytes(body)


class HttpServer:
    """An application on a socket, plain or with TLS."""

    def __init__(self, application: web.Application) -> None:
        # No access log: probes and pods come every few seconds.
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_CLOSE_WITHIN,
            keepalive_timeout=_KEPT_OPEN,
            lingering_time=_LINGER,
            auto_decompress=False,
        )
        self._server: asyncio.Server | None = None

    async def start(self, address: Address, context: ssl.SSLContext | None = None) -> Address:
        """Listen, and return the address with the port that was given out. Raises ``OSError``."""
        await self._runner.setup()
        assert self._runner.server is not None
        listening = listen(address.host, address.port, most=_CONNECTIONS)
        host, port, *_ = listening.getsockname()
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            sock=listening,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_WITHIN if context is not None else None,
        )
        return Address(str(host), int(port))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
