"""HTTP endpoints of a consumer process, with the same paths as a relay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mailboat_spec.consumer_report import ConsumerReport, ConsumerReports

_GAUGES: Final = (
    ("mailboat_consumer_lag", "Events that no consumer has handled (counted up to a bound).", "lag"),
    ("mailboat_consumer_oldest_age_seconds", "Age of the oldest of them; 0 when there is none.", "oldest_age"),
    ("mailboat_consumer_parked", "Events that wait for another attempt, and those behind them.", "parked"),
    ("mailboat_consumer_dead_letters", "Dead letters, not replayed.", "dead"),
    ("mailboat_consumer_workers", "Connections or handlers of this process that handle events.", "workers"),
)
_COUNTERS: Final = (
    ("mailboat_consumer_handled", "Events handled since this process started.", "handled"),
    ("mailboat_consumer_ignored", "Handler calls that ended with Ignore.", "ignored"),
    ("mailboat_consumer_refused", "Attempts that failed since this process started.", "refused"),
    ("mailboat_consumer_redelivered", "Events handled that had been delivered before.", "redelivered"),
    ("mailboat_consumer_duplicates", "Events skipped because they were done.", "duplicates"),
    ("mailboat_consumer_takeovers", "Events whose earlier consumer died.", "takeovers"),
    ("mailboat_consumer_overlaps", "Results that came after another consumer took the event over.", "overlaps"),
    ("mailboat_consumer_unclaimed", "Events handled without the store of handled events.", "unclaimed"),
)


class ConsumerHttpApi:
    """The endpoints, without a socket."""

    def __init__(self, status: Callable[[], ConsumerReport]) -> None:
        self._status = status
        self._registry = CollectorRegistry()
        self._registry.register(_Samples(status))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._connected_once = False

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/status", self._render_status)
        application.router.add_get("/metrics", self._metrics)
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

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


class _Samples(Collector):
    def __init__(self, status: Callable[[], ConsumerReport]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=("consumer",))
            gauge.add_metric([status.name], float(getattr(status, field) or 0))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("consumer",))
            counter.add_metric([status.name], float(getattr(status, field)))
            yield counter
