"""Lines of ``mailboat status``, one per subscription, merged from the status of relays and the database.

The database has the progress, even if no relay runs. Relays have rates, errors and the state of sinks. Pure functions
from documents and rows to lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mailboat.cli.printing import age, shortened
from mailboat.outbox.overview import KnownSubscription, Waiting
from mailboat_spec import EventSubscription, full_name
from mailboat_spec.consumer_report import ConsumerReport

HEADER = ("READY", "NAME", "SINK", "PARTITIONS", "LAG", "OLDEST", "PARKED", "DEAD", "RATE", "LAST ERROR")
_ERROR_WIDTH = 100


@dataclass(frozen=True, slots=True)
class StatusLine:
    """Status of one subscription. None means unknown."""

    name: str
    sink: str | None
    state: str
    owned: int
    partitions: int
    lag: int | None
    bounded: bool
    oldest_age: float | None
    parked: int | None
    dead: int | None
    rate: float | None
    sink_reachable: bool | None
    last_error: str | None
    last_error_age: float | None = None
    """Seconds since the error happened; None or 0 while it lasts."""

    @property
    def ready(self) -> bool:
        """True if the subscription runs, every partition has an owner, and the sink is not known to be unavailable."""
        return self.state == "Running" and self.owned == self.partitions and self.sink_reachable is not False

    @property
    def ready_text(self) -> str:
        return str(self.ready) if self.state == "Running" else self.state

    def cells(self) -> tuple[str, ...]:
        """Return the cells in the order of the header."""
        return (
            self.ready_text,
            self.name,
            self.sink or "-",
            f"{self.owned}/{self.partitions}",
            "-" if self.lag is None else f"{self.lag}{'+' if self.bounded else ''}",
            age(self.oldest_age),
            "-" if self.parked is None else str(self.parked),
            "-" if self.dead is None else str(self.dead),
            "-" if self.rate is None else f"{self.rate:.0f}/s" if self.rate >= 10 else f"{self.rate:.1f}/s",
            shortened(self._error, _ERROR_WIDTH) if self.last_error else "",
        )

    @property
    def _error(self) -> str:
        ago = self.last_error_age or 0.0
        return f"{age(ago)} ago: {self.last_error}" if ago >= 1.0 else self.last_error or ""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ready": self.ready,
            "state": self.state,
            "sink": self.sink,
            "owned": self.owned,
            "partitions": self.partitions,
            "lag": self.lag,
            "lagBounded": self.bounded,
            "oldestAge": self.oldest_age,
            "parked": self.parked,
            "dead": self.dead,
            "rate": self.rate,
            "sinkReachable": self.sink_reachable,
            "lastError": self.last_error,
            "lastErrorAge": self.last_error_age,
        }


def from_relays(relays: Iterable[Mapping[str, Any]]) -> list[StatusLine]:
    """Return a line per subscription, summed over the ``/status`` documents of relays."""
    parts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for relay in relays:
        for subscription in relay.get("subscriptions", ()):
            parts[str(subscription["name"])].append(subscription)
    return [_added_up(name, of_it) for name, of_it in sorted(parts.items())]


def _added_up(name: str, parts: Sequence[Mapping[str, Any]]) -> StatusLine:
    ages = [part["oldestAge"] for part in parts if part["oldestAge"] is not None]
    return StatusLine(
        name=name,
        sink=str(parts[0]["sink"]),
        state=_state([str(part["state"]) for part in parts]),
        owned=sum(len(part["owned"]) for part in parts),
        partitions=max(part["partitions"] for part in parts),
        lag=sum(part["lag"] for part in parts),
        bounded=any(part["lagBounded"] for part in parts),
        oldest_age=max(ages, default=None),
        parked=sum(part["parked"] for part in parts),
        dead=max(part["dead"] for part in parts),
        rate=sum(part["rate"] for part in parts),
        # A relay without a partition of the subscription has not connected to its sink, so its value is ignored.
        sink_reachable=all(part["sinkReachable"] is not False for part in parts if part["owned"]),
        **_last_error(parts),
    )


def from_consumers(reports: Iterable[ConsumerReport]) -> list[StatusLine]:
    """Return a line per subscription, summed over the reports of its consumers."""
    parts: dict[str, list[ConsumerReport]] = defaultdict(list)
    for report in reports:
        parts[report.name].append(report)
    return [_consumed(name, of_it) for name, of_it in sorted(parts.items())]


def _consumed(name: str, parts: Sequence[ConsumerReport]) -> StatusLine:
    # Each report of a pull consumer covers the whole subscription, each of a consumer with a source its partitions.
    whole = sum if parts[0].source is not None else max
    owned = sum(part.source.owned for part in parts if part.source is not None)
    return StatusLine(
        name=name,
        sink="pull",
        state=_state([part.state for part in parts]),
        owned=owned,
        partitions=owned,
        lag=whole(part.lag for part in parts),
        bounded=any(part.lag_bounded for part in parts),
        oldest_age=max((part.oldest_age for part in parts if part.oldest_age is not None), default=None),
        parked=whole(part.parked for part in parts),
        dead=whole(part.dead for part in parts),
        rate=None,
        sink_reachable=all(_reaches_all(part) for part in parts),
        last_error=next((text for part in parts for text in (part.message, part.last_error) if text), None),
    )


def _reaches_all(report: ConsumerReport) -> bool:
    servers = [each for each in (report.source, report.idempotency, report.dead_letters) if each is not None]
    stopped = report.dead_letters is not None and report.dead_letters.stopped
    return report.state != "Connecting" and not stopped and all(each.reachable for each in servers)


def _last_error(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the most recent error of all relays, with its age."""
    told = [(part.get("lastErrorAge") or 0.0, part["lastError"]) for part in parts if part["lastError"]]
    since, error = min(told, default=(None, None))
    return {"last_error": error, "last_error_age": since}


def _state(states: Sequence[str]) -> str:
    """Combine the states of relays. Paused on one means paused. Failed only if it failed on all: others may run it."""
    if "Paused" in states:
        return "Paused"
    return "Failed" if all(state == "Failed" for state in states) else "Running"


def from_database(known: KnownSubscription, waiting: Waiting, manifests: Iterable[EventSubscription]) -> StatusLine:
    """Return the line from the database alone, as if no relay runs."""
    sink = next((manifest.spec.sink.kind for manifest in manifests if full_name(manifest) == known.name), None)
    return StatusLine(
        name=known.name,
        sink=sink,
        state=known.state,
        owned=known.owned,
        partitions=known.partitions,
        lag=waiting.lag,
        bounded=waiting.bounded,
        oldest_age=waiting.oldest_age,
        parked=waiting.parked,
        dead=waiting.dead,
        rate=None,
        sink_reachable=None,
        last_error=_kept(known) or known.paused_reason or known.parked_error,
    )


def _kept(known: KnownSubscription) -> str | None:
    if known.kept_until is None:
        return None
    return f"its progress is kept until {known.kept_until}: created again, it continues; `mailboat forget` ends that"


def not_started(manifest: EventSubscription) -> StatusLine:
    """Return the line for a manifest that no relay has ever run."""
    return StatusLine(
        name=full_name(manifest),
        sink=manifest.spec.sink.kind,
        state=manifest.spec.state.value,
        owned=0,
        partitions=manifest.spec.partitions,
        lag=None,
        bounded=False,
        oldest_age=None,
        parked=None,
        dead=None,
        rate=None,
        sink_reachable=None,
        last_error="no relay has run it yet",
    )


def enriched(line: StatusLine, told: Iterable[StatusLine]) -> StatusLine:
    """Return the database's line with the fields that only relays report."""
    for relay in told:
        if relay.name == line.name:
            return replace(
                line,
                sink=line.sink or relay.sink,
                state="Failed" if relay.state == "Failed" else line.state,
                rate=relay.rate,
                sink_reachable=relay.sink_reachable,
                last_error=relay.last_error or line.last_error,
                last_error_age=relay.last_error_age if relay.last_error else None,
            )
    return line
