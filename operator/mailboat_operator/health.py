"""/livez, /readyz and /metrics of an operator, over plain HTTP.

- ``/livez`` answers while the event loop turns. Nothing else makes a restart worth while: an operator that lost the
  lead or whose core failed has ended already, and an API server that is away is waited for.
- ``/readyz`` says whether the API server should call this replica's webhook: it has a certificate, and is not ending.
  Who leads does not matter for it.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


class Health:
    """The answers, without a socket."""

    def __init__(self, not_ready: Callable[[], str | None], registry: CollectorRegistry) -> None:
        """``not_ready`` says why not; None: ready."""
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
