"""HTTP endpoints of a consumer process, with the same paths as a relay."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client.registry import Collector

from mailboat.http.metrics import Metrics
from mailboat_spec.consumer_report import ConsumerReport, ConsumerReports


class ConsumerHttpApi:
    """The endpoints, without a socket."""

    def __init__(self, status: Callable[[], ConsumerReport], samples: Collector) -> None:
        self._status = status
        self._metrics = Metrics(samples)
        self._connected_once = False

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/status", self._render_status)
        application.router.add_get("/metrics", self._render_metrics)
        return application

    async def _livez(self, _: web.Request) -> web.Response:
        """Return ok: a response proves that the event loop runs."""
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        status = self._status()
        self._connected_once = self._connected_once or status.state == "Running"
        if status.state == "Stopping" or not self._connected_once:
            return web.Response(text=f"{status.state}: {status.message or 'not connected yet'}\n", status=503)
        return web.Response(text="ok\n")

    async def _render_status(self, _: web.Request) -> web.Response:
        document = ConsumerReports(consumers=(self._status(),))
        return web.Response(text=document.model_dump_json(), content_type="application/json")

    async def _render_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
