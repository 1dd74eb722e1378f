"""The operator's HTTP servers, with bounds on the cost of a client, and the health endpoints.

Neither the webhook nor the probes require credentials. Therefore the number of connections is bounded (see
``mailboat_spec.listener``), slow clients are disconnected, compressed bodies are not decompressed, and ``Memory``
bounds the memory of all requests together.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

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


class ListenFailed(Exception):
    """The address is not available; the message contains the remedy."""


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
        if self._free < size and self._waiters >= self._max_waiters:
            raise Busy
        self._waiters += 1
        try:
            while self._free < size:
                self._released.clear()
                await self._released.wait()
        finally:
            self._waiters -= 1
        self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._released.set()


def health_application(not_ready: Callable[[], str | None], registry: CollectorRegistry) -> web.Application:
    """Return the endpoints /livez, /readyz and /metrics. ``not_ready`` returns the reason; None if ready.

    - ``/livez`` answers while the event loop runs. No other state justifies a restart: an operator that lost the lead
      or whose core failed has already ended, and an unavailable API server is retried.
    - ``/readyz`` reports whether the API server should call this replica's webhook: the replica has a certificate and
      is not stopping. Leadership does not matter.
    """

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    application = web.Application()
    application.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return application


@asynccontextmanager
async def serving(
    application: web.Application, address: Address, flag: str, context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve an application, plain or with TLS, during the block. Yield the address with the actual port.

    Raises ``ListenFailed``. ``flag``: the setting with the address.
    """
    # No access log: probes and pods cause requests every few seconds.
    runner = web.AppRunner(
        application,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=_CLOSE_WITHIN,
        keepalive_timeout=_KEEPALIVE,
        lingering_time=_LINGER,
        auto_decompress=False,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        try:
            listener = listen(address.host, address.port, most=_CONNECTIONS)
        except OSError as error:
            reason = error.strerror or error
            raise ListenFailed(f"can't listen on {address}: {reason}. Choose another address with {flag}.") from error
        host, port, *_ = listener.getsockname()
        handshake_timeout = _HANDSHAKE_WITHIN if context is not None else None
        server = await asyncio.get_running_loop().create_server(
            runner.server, sock=listener, ssl=context, ssl_handshake_timeout=handshake_timeout
        )
        with closing(server):
            yield str(Address(str(host), int(port)))
    finally:
        await runner.cleanup()
