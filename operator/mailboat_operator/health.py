"""/livez, /readyz and /metrics of an operator, over plain HTTP.

- ``/livez`` answers while the event loop runs. No other state justifies a restart: an operator that lost the lead or
  whose core failed has already ended, and an unavailable API server is retried.
- ``/readyz`` reports whether the API server should call this replica's webhook: the replica has a certificate and is
  not stopping. Leadership does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


class Health:
    """Request handling of the health endpoints, without a socket."""

    def __init__(self, not_ready: Callable[[], str | None], registry: CollectorRegistry) -> None:
        """``not_ready`` returns the reason; None if ready."""
        self._not_ready = not_ready
        self._registry = registry

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        return application

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})
