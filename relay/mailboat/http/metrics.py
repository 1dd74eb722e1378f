"""Prometheus metrics: the relay's status, converted to samples at each scrape.

Labels are resources (``relay``, ``subscription``), of which a manifest has a handful; never keys, event types or
errors, which are unbounded. A relay reports only the partitions it owns: sum over relays for a subscription's lag. Only
``mailboat_dead_letters`` covers the whole subscription: use the maximum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from aiohttp import typedefs, web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mailboat.delivery.counters import DeliveryHistograms, Histogram
from mailboat.runtime.relay_status import RelayState, RelayStatus, SubscriptionStatus

_BY_RELAY = ("relay",)
_BY_SUBSCRIPTION = ("relay", "subscription")

_RELAY_GAUGES: tuple[tuple[str, str, Callable[[RelayStatus], float | None]], ...] = (
    ("mailboat_relay_running", "1 while the relay is connected and works.", lambda r: r.state is RelayState.RUNNING),
    ("mailboat_database_up", "1 while the database can be reached.", lambda relay: relay.database_reachable),
    (
        "mailboat_time_partitions_ahead_days",
        "Days for which the outbox has time partitions. At 0 writers fail: look below 7.",
        lambda relay: relay.partitions_ahead_days,
    ),
    (
        "mailboat_retention_blocked",
        "1 while old events can't be removed, because a subscription or a session needs them.",
        lambda relay: relay.retention_blocked is not None,
    ),
    (
        "mailboat_oldest_snapshot_age_seconds",
        "Age of the oldest snapshot in the database; the same in all relays. Former versions of rows are kept as long.",
        lambda relay: relay.oldest_snapshot_age,
    ),
    (
        "mailboat_unmatched_events",
        "Of the newest 1000 events, those of the last day that no subscription matches; the same in all relays.",
        lambda relay: sum(relay.coverage.unmatched.values()),
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[SubscriptionStatus], float]], ...] = (
    ("mailboat_lag", "Events that wait, in the partitions owned here (counted up to a bound).", lambda s: s.lag),
    ("mailboat_lag_bounded", "1 where counting stopped at the bound: there may be more.", lambda s: s.lag_bounded),
    (
        "mailboat_oldest_age_seconds",
        "Age of the oldest event that waits; 0 when none does.",
        lambda s: s.oldest_age or 0,
    ),
    ("mailboat_parked", "Events that failed and wait for another attempt, and those behind them.", lambda s: s.parked),
    ("mailboat_dead_letters", "Dead letters of the whole subscription, not replayed.", lambda s: s.dead),
    ("mailboat_sink_up", "1 while the destination can be reached.", lambda s: bool(s.sink_reachable)),
    ("mailboat_paused", "1 while the subscription is paused.", lambda s: s.state == "Paused"),
    ("mailboat_failed", "1 while this relay can't run the subscription at all.", lambda s: s.state == "Failed"),
    ("mailboat_partitions", "Partitions of the whole subscription.", lambda s: s.partitions),
    ("mailboat_owned_partitions", "Partitions that this relay moves.", lambda s: len(s.owned)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[SubscriptionStatus], float]], ...] = (
    ("mailboat_published", "Events delivered since this process started.", lambda s: s.published),
    ("mailboat_refused", "Attempts that the destination refused since this process started.", lambda s: s.refused),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[DeliveryHistograms], Histogram]], ...] = (
    (
        "mailboat_delivery_latency_seconds",
        "From the insert of an event to its acknowledgement: the oldest event of each delivered batch.",
        lambda meters: meters.latency,
    ),
    ("mailboat_batch_size", "Messages per batch that was passed to the destination.", lambda meters: meters.batch),
    ("mailboat_delivery_attempts", "Attempts that each delivered event took.", lambda meters: meters.attempts),
)


class StatusCollector(Collector):
    """Reads the status of the relays at every scrape; keeps no state."""

    def __init__(self, statuses: Callable[[], Sequence[RelayStatus]]) -> None:
        self._statuses = statuses

    def describe(self) -> Iterable[core.Metric]:
        return ()  # no samples at registration: the relays have not started yet

    def collect(self) -> Iterator[core.Metric]:
        statuses = self._statuses()
        info = core.InfoMetricFamily("mailboat_relay", "Who this relay is.", labels=_BY_RELAY)
        for relay in statuses:
            info.add_metric([relay.name], {"id": relay.relay, "outbox": relay.outbox, "version": version("mailboat")})
        yield info
        for name, text, measure in _RELAY_GAUGES:
            gauge = core.GaugeMetricFamily(name, text, labels=_BY_RELAY)
            for relay in statuses:
                if (measured := measure(relay)) is not None:
                    gauge.add_metric([relay.name], float(measured))
            yield gauge
        reported = [(relay.name, each) for relay in statuses for each in relay.subscriptions]
        for kind, table in ((core.GaugeMetricFamily, _GAUGES), (core.CounterMetricFamily, _COUNTERS)):
            for name, text, value in table:
                family = kind(name, text, labels=_BY_SUBSCRIPTION)
                for relay_name, each in reported:
                    family.add_metric([relay_name, each.name], float(value(each)))
                yield family
        for name, text, chosen in _HISTOGRAMS:
            distribution = core.HistogramMetricFamily(name, text, labels=_BY_SUBSCRIPTION)
            for relay_name, each in reported:
                if each.meters is not None:
                    histogram = chosen(each.meters)
                    bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
                    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                    distribution.add_metric([relay_name, each.name], buckets, histogram.total)
            yield distribution


def metrics_handler(samples: Collector) -> typedefs.Handler:
    """Return a handler with its own registry: several relays in one process (and tests) do not share the global one."""
    registry = CollectorRegistry()
    registry.register(samples)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    async def respond(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return respond
