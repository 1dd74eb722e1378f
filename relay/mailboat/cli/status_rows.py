"""Lines of ``mailboat status``, one per subscription: pure functions from documents and rows to lines, and to text.

The database has the progress, even if no relay runs. Relays have rates, errors and the state of sinks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mailboat.cli.output import age, columns, counted, field_lines, safe, shortened
from mailboat.store.admin.overview import KnownSubscription
from mailboat.store.outbox_store import Backlog
from mailboat_spec import EventSubscription, full_name
from mailboat_spec.consumer_report import ConsumerReport
from mailboat_spec.relay_status import as_json

HEADER = ("READY", "NAME", "SINK", "OWNED", "LAG", "OLDEST", "PARKED", "DEAD", "RATE")
_RELAYS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StatusLine:
    """Status of one subscription. None means unknown."""

    name: str
    sink: str | None
    state: str
    partitions: int
    owners: Mapping[int, str] = field(default_factory=dict)
    """Partition -> relay."""
    held: int = field(default=0, metadata={"wire": False})
    """Number of partitions that consumers behind a broker hold."""
    lag: int | None = None
    lag_bounded: bool = False
    oldest_age: float | None = None
    parked: int | None = None
    dead: int | None = None
    rate: float | None = None
    sink_reachable: bool | None = None
    last_error: str | None = None
    last_error_age: float | None = None
    """Seconds since the error happened; None or 0 while it lasts."""
    orphaned: bool = False
    """No manifest here and no live relay has the subscription, so its events are not delivered."""

    @property
    def owned(self) -> int:
        return len(self.owners) or self.held

    @property
    def ready(self) -> bool:
        """Whether the subscription runs, every partition has an owner, and the sink is not known to be unavailable."""
        # A consumer takes a free partition of a pull subscription for each transaction.
        owned = self.sink == "pull" or self.owned == self.partitions
        return self.state == "Running" and owned and self.sink_reachable is not False

    @property
    def ready_text(self) -> str:
        return str(self.ready) if self.state == "Running" else self.state

    def cells(self) -> tuple[str, ...]:
        return (
            self.ready_text,
            self.name,
            self.sink or "-",
            f"{self.owned}/{self.partitions}",
            "-" if self.lag is None else f"{self.lag}{'+' if self.lag_bounded else ''}",
            age(self.oldest_age),
            "-" if self.parked is None else str(self.parked),
            "-" if self.dead is None else str(self.dead),
            "-" if self.rate is None else f"{self.rate:.0f}/s" if self.rate >= 10 else f"{self.rate:.1f}/s",
        )

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "ready": self.ready, "owned": self.owned, **as_json(self)}


def overview_text(lines: Sequence[StatusLine], width: int) -> list[str]:
    """Return the table, then the last errors, the orphaned subscriptions and the relays, within ``width`` columns."""
    text = columns(HEADER, (line.cells() for line in lines), gap=2)
    if failing := [line for line in lines if line.last_error]:
        ages = [age(line.last_error_age or None) for line in failing]
        room = max(20, width - max(len(line.name) for line in failing) - max(3, *map(len, ages)) - 4)
        errors = [shortened(line.last_error or "", room) for line in failing]
        rows = zip((line.name for line in failing), ages, errors, strict=True)
        text += ["", *columns(("NAME", "AGO", "LAST ERROR"), rows, gap=2)]
    notes = [f"{line.name}: no relay has it: mailboat forget {line.name}" for line in lines if line.orphaned]
    if counts := Counter(relay for line in lines for relay in line.owners.values()):
        shown = [f"{relay} ({counted(count, 'partition')})" for relay, count in sorted(counts.items())]
        more = f" and {len(shown) - _RELAYS_SHOWN} more" if len(shown) > _RELAYS_SHOWN else ""
        notes.append(f"relays: {', '.join(shown[:_RELAYS_SHOWN])}{more}")
    return [*text, *([""] if notes else []), *(safe(note) for note in notes)]


def details_text(line: StatusLine) -> list[str]:
    fields = dict(zip((name.lower() for name in HEADER), line.cells(), strict=True))
    partitions: dict[str, list[int]] = defaultdict(list)
    for partition in range(line.partitions):
        partitions[line.owners.get(partition, "no owner")].append(partition)
    if line.sink != "pull":
        owners = (f"{relay}: {', '.join(map(str, numbers))}" for relay, numbers in sorted(partitions.items()))
        fields["owners"] = "; ".join(owners)
    if line.orphaned:
        fields["orphaned"] = f"no relay has it: mailboat forget {line.name}"
    if line.last_error:
        when = f" ({age(line.last_error_age)} ago)" if line.last_error_age else ""
        fields["last error"] = f"{line.last_error}{when}"
    return field_lines(fields)


def from_relays(relays: Iterable[Mapping[str, Any]]) -> list[StatusLine]:
    """Return a line per subscription, summed over the ``/status`` documents of relays."""
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for relay in relays:
        for subscription in relay.get("subscriptions", ()):
            parts[str(subscription["name"])].append({**subscription, "relay": str(relay.get("relay"))})
    return [_sum(name, parts[name]) for name in sorted(parts)]


def _sum(name: str, parts: Sequence[Mapping[str, Any]]) -> StatusLine:
    errors = [(part.get("lastErrorAge") or 0.0, part["lastError"]) for part in parts if part["lastError"]]
    error_age, error = min(errors, default=(None, None))  # the most recent one
    return StatusLine(
        name=name,
        sink=str(parts[0]["sink"]),
        state=_state([str(part["state"]) for part in parts]),
        owners={owned["partition"]: part["relay"] for part in parts for owned in part["owned"]},
        partitions=max(part["partitions"] for part in parts),
        lag=sum(part["lag"] for part in parts),
        lag_bounded=any(part["lagBounded"] for part in parts),
        oldest_age=max((part["oldestAge"] for part in parts if part["oldestAge"] is not None), default=None),
        parked=sum(part["parked"] for part in parts),
        dead=max(part["dead"] for part in parts),
        rate=sum(part["rate"] for part in parts),
        # A relay without a partition of the subscription has not connected to its sink, so its value is ignored.
        sink_reachable=all(part["sinkReachable"] is not False for part in parts if part["owned"]),
        last_error=error,
        last_error_age=error_age,
    )


def from_consumers(reports: Iterable[ConsumerReport]) -> list[StatusLine]:
    """Return a line per subscription, summed over the reports of its consumers."""
    parts: dict[str, list[ConsumerReport]] = defaultdict(list)
    for report in reports:
        parts[report.name].append(report)
    return [_consumed(name, reports) for name, reports in sorted(parts.items())]


def _consumed(name: str, parts: Sequence[ConsumerReport]) -> StatusLine:
    # Each report of a pull consumer covers the whole subscription, each of a consumer with a source its partitions.
    combine = sum if parts[0].source is not None else max
    held = sum(part.source.owned for part in parts if part.source is not None)
    return StatusLine(
        name=name,
        sink="pull",
        state=_state([part.state for part in parts]),
        partitions=held,
        held=held,
        lag=combine(part.lag for part in parts),
        lag_bounded=any(part.lag_bounded for part in parts),
        oldest_age=max((part.oldest_age for part in parts if part.oldest_age is not None), default=None),
        parked=combine(part.parked for part in parts),
        dead=combine(part.dead for part in parts),
        sink_reachable=all(_reaches_all(part) for part in parts),
        last_error=next((text for part in parts for text in (part.message, part.last_error) if text), None),
    )


def _reaches_all(report: ConsumerReport) -> bool:
    servers = [each for each in (report.source, report.idempotency, report.dead_letters) if each is not None]
    stopped = report.dead_letters is not None and report.dead_letters.stopped
    return report.state != "Connecting" and not stopped and all(each.reachable for each in servers)


def _state(states: Sequence[str]) -> str:
    """Combine the states of relays. Paused on one means paused. Failed only if it failed on all: others may run it."""
    if "Paused" in states:
        return "Paused"
    return "Failed" if all(state == "Failed" for state in states) else "Running"


def from_database(known: KnownSubscription, backlog: Backlog, manifests: Iterable[EventSubscription]) -> StatusLine:
    """Return the line from the database alone, as if no relay runs."""
    manifest = next((each for each in manifests if full_name(each) == known.name), None)
    remedy = "created again, it continues; `mailboat forget` ends that"
    kept = known.kept_until and f"its progress is kept until {known.kept_until}: {remedy}"
    lags = backlog.partitions.values()
    return StatusLine(
        name=known.name,
        sink=manifest.spec.sink.kind if manifest else None,
        state=known.state,
        owners=known.owners,
        partitions=known.partitions,
        lag=sum(lag.pending for lag in lags),
        lag_bounded=any(lag.bounded for lag in lags),
        oldest_age=max((lag.oldest_age for lag in lags if lag.oldest_age is not None), default=None),
        parked=sum(backlog.parked.values()),
        dead=backlog.dead,
        last_error=kept or known.paused_reason or known.parked_error,
        last_error_age=None if kept or known.paused_reason else known.parked_error_age,
        orphaned=manifest is None and not known.served and known.state != "Deleted",
    )


def not_started(manifest: EventSubscription) -> StatusLine:
    """Return the line for a manifest that no relay has ever run."""
    name, spec, error = full_name(manifest), manifest.spec, "no relay has run it yet"
    return StatusLine(name, spec.sink.kind, spec.state.value, spec.partitions, last_error=error)


def enriched(line: StatusLine, reported: StatusLine | None) -> StatusLine:
    """Return the database's line with the fields that only relays report."""
    if reported is None:
        return line
    error = reported if reported.last_error else line
    return replace(
        line,
        sink=line.sink or reported.sink,
        state="Failed" if reported.state == "Failed" else line.state,
        rate=reported.rate,
        sink_reachable=reported.sink_reachable,
        last_error=error.last_error,
        last_error_age=error.last_error_age,
    )
