"""Prometheus metrics of a consumer process: its report, converted to samples at each scrape."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mailboat_spec.consumer_report import ConsumerReport

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


class ReportCollector(Collector):
    """Reads the report at every scrape; keeps no state."""

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
