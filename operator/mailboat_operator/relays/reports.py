"""Models of a relay's ``GET /status`` answer, parsed leniently: a relay may be older or newer than the operator.

The relay's side is ``mailboat.runtime.status``. The two packages never import one another, so the fields are defined
here a second time; a test with real relays compares both.

A report comes from a pod that an application owns, and the operator keeps the last one of each pod. So only the
subscriptions and partitions named by resources are kept, with texts cut to a maximum length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from mailboat_spec import EventSubscriptionSpec, Reason
from mailboat_spec.consumer_report import ConsumerReport

_LONGEST_TEXT: Final = 1024
_LONGEST_NAME: Final = 317  # namespace/pod
_MOST_PARTITIONS: Final = 256
_MOST_SILENT: Final = 16
_USUAL_PARTITIONS: Final[int] = EventSubscriptionSpec.model_fields["partitions"].default
_SMALLEST: Final = 64 * 1024
_PER_SUBSCRIPTION: Final = 2048
_PER_PARTITION: Final = 768
"""Bytes. A partition takes about 150, and more if it carries an error."""
_LARGEST: Final = 12 * 1024 * 1024

Partitions = Mapping[str, int]
"""Subscriptions of one relay by full name, each with its number of partitions."""

Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(le=1e12)]


def partitions_of(subscriptions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the subscriptions that reports may contain, from API resources, valid or not."""
    return {f"{each['metadata']['namespace']}/{each['metadata']['name']}": _partitions(each) for each in subscriptions}


def _partitions(subscription: Mapping[str, Any]) -> int:
    spec = subscription.get("spec")
    number = spec.get("partitions", _USUAL_PARTITIONS) if isinstance(spec, Mapping) else None
    return number if isinstance(number, int) and 0 < number <= _MOST_PARTITIONS else _MOST_PARTITIONS


def largest_report(partitions: Partitions) -> int:
    """Return the maximum size of a report in bytes."""
    needed = sum(_PER_SUBSCRIPTION + count * _PER_PARTITION for count in partitions.values())
    return min(_SMALLEST + needed, _LARGEST)


def pod_of(relay_id: str | None, namespace: str) -> str:
    """Return the pod name of a relay. The id of a relay in another namespace (same database) is returned unchanged."""
    return (relay_id or "").removeprefix(f"{namespace}/")


def reason_given(word: str, otherwise: Reason) -> Reason:
    """Parse a relay's machine-readable reason. A relay of another version may use unknown words."""
    try:
        return Reason(word)
    except ValueError:
        return otherwise


class _Reported(BaseModel):
    """Base without the null handling of other models, which costs a Python call for each of thousands of objects."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


Reported = TypeVar("Reported", bound=_Reported)


class PartitionReport(_Reported):
    """A partition owned by the reporting relay."""

    partition: Count
    lag: Count = 0
    lag_bounded: bool = False
    oldest_age: Seconds | None = None
    parked: Count = 0


class SubscriptionReport(_Reported):
    """A subscription, as far as the reporting relay delivers it."""

    name: str
    state: str = "Running"
    """Running, Paused, or Failed: the subscription can't be built, for the reason in ``last_error``."""
    dead: Count = 0
    blocked: Count = 0
    """Blocked keys."""
    rate: Annotated[float, Field(le=1e12)] = 0.0
    sink_reachable: bool | None = True
    """None until the destination answered, or could not be reached, for the first time."""
    last_error: str | None = None
    last_error_age: Seconds | None = None
    """Seconds since the error happened; 0 while it lasts."""
    reason: str = ""
    owned: tuple[PartitionReport, ...] = ()
    orphans: tuple[PartitionReport, ...] = ()
    """Partitions whose owner is silent or missing, counted by the reporting relay."""
    owners: dict[int, str | None] = Field(default_factory=dict)


class RelayReport(_Reported):
    """One OutboxRelay in the reporting process."""

    name: str
    relay: str = ""
    state: str = ""
    message: str = ""
    reason: str = ""
    database_reachable: bool = False
    schema_ready: bool = False
    partitions_ahead_days: Seconds | None = None
    retention_blocked: str | None = None
    database: str = ""
    """Name of the database and identifier of its system."""
    missing_roles: str = ""
    """SQL for an administrator if group roles are missing; else empty."""
    silent: tuple[str, ...] = ()
    """Relays whose heartbeats are missing."""
    subscriptions: tuple[SubscriptionReport, ...] = ()

    def subscription(self, name: str) -> SubscriptionReport | None:
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, SubscriptionReport]:
        return {each.name: each for each in reversed(self.subscriptions)}


class ConfigReport(_Reported):
    """Configuration version in use, and the error of the last rejected one."""

    version: Count | None = None
    error: str | None = None


class Report(_Reported):
    """A complete status report."""

    relays: tuple[RelayReport, ...] = ()
    config: ConfigReport = Field(default_factory=ConfigReport)

    def relay(self, name: str) -> RelayReport | None:
        return next((each for each in self.relays if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """Last report of one relay pod, or the reason why there is none."""

    pod: str
    report: Report | None
    error: str = ""
    silent: bool = False
    """The pod answered before and does not any more. ``report``, if any, is from before."""
    trouble: str = ""
    """Kubernetes' reason why the pod's relay does not run; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ConsumerAnswer:
    """Last report of one consumer pod, or the reason why there is none."""

    pod: str
    report: ConsumerReport | None
    error: str = ""


def read_report(content: bytes) -> Report | None:
    """Parse a report; None if the content is not a relay status."""
    try:
        return Report.model_validate_json(content)
    except (ValidationError, RecursionError):
        return None


def bounded(report: Report, relay: str, partitions: Partitions) -> Report:
    """Return the part of the report about this relay and its known subscriptions."""
    found = report.relay(relay)
    relays = () if found is None else (_bounded_relay(found, partitions),)
    return Report(relays=relays, config=_cut(report.config, "error"))


def _bounded_relay(report: RelayReport, partitions: Partitions) -> RelayReport:
    named = {each.name: each for each in report.subscriptions if each.name in partitions}
    kept = tuple(_bounded_subscription(each, partitions[each.name]) for each in named.values())
    cut = _cut(report, "relay", "state", "message", "reason", "retention_blocked", "database", "missing_roles")
    silent = tuple(name for name in report.silent if len(name) <= _LONGEST_NAME)[:_MOST_SILENT]
    return cut.model_copy(update={"subscriptions": kept, "silent": silent})


def _bounded_subscription(report: SubscriptionReport, count: int) -> SubscriptionReport:
    owned, orphans = (
        tuple(each for each in given if 0 <= each.partition < count)[:count] for given in (report.owned, report.orphans)
    )
    owners = {
        number: owner
        for number, owner in report.owners.items()
        if 0 <= number < count and len(owner or "") <= _LONGEST_NAME
    }
    cut = _cut(report, "state", "last_error", "reason")
    return cut.model_copy(update={"owned": owned, "orphans": orphans, "owners": owners})


def _cut(report: Reported, *fields: str) -> Reported:
    long = {field: text for field in fields if len(text := getattr(report, field) or "") > _LONGEST_TEXT}
    if not long:
        return report
    return report.model_copy(update={field: text[:_LONGEST_TEXT] for field, text in long.items()})
