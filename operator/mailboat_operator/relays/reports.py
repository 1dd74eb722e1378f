"""Reports of relay and consumer pods, and the bounds on what the operator keeps of them.

The wire models are ``mailboat_spec.relay_status`` and ``mailboat_spec.consumer_report``. A report comes from a pod that
an application owns, and the operator keeps the last one of each pod. So only the subscriptions and partitions named by
resources are kept, with texts cut to a maximum length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from mailboat_spec import EventSubscriptionSpec, Reason
from mailboat_spec.consumer_report import ConsumerReport
from mailboat_spec.relay_status import ConfigReport, ProcessStatus, RelayStatus, SubscriptionStatus

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

Reported = TypeVar("Reported", RelayStatus, SubscriptionStatus, ConfigReport)


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


def parse_reason(text: str, default: Reason) -> Reason:
    """Parse a relay's machine-readable reason. A relay of another version may use unknown words."""
    try:
        return Reason(text)
    except ValueError:
        return default


R = TypeVar("R", ProcessStatus, ConsumerReport)


@dataclass(frozen=True)
class PodAnswer(Generic[R]):
    """Last report of one pod, or the reason why there is none."""

    pod: str
    report: R | None
    error: str = ""
    """Why the last poll brought no report; empty if it did."""
    silent: bool = False
    """The pod answered before and does not any more. ``report``, if any, is from before."""
    problem: str = ""
    """Kubernetes' reason why the pod's relay does not run; empty if there is none."""


Answer = PodAnswer[ProcessStatus]
ConsumerAnswer = PodAnswer[ConsumerReport]


def bounded(status: ProcessStatus, relay: str, partitions: Partitions) -> ProcessStatus:
    """Return the part of the status about this relay and its known subscriptions."""
    found = status.relay(relay)
    relays = () if found is None else (_bounded_relay(found, partitions),)
    return ProcessStatus(relays, _cut(status.config, "error"))


_REMARKS = ("retention_blocked", "old_snapshot")


def _bounded_relay(status: RelayStatus, partitions: Partitions) -> RelayStatus:
    named = {each.name: each for each in status.subscriptions if each.name in partitions}
    kept = tuple(_bounded_subscription(each, partitions[each.name]) for each in named.values())
    cut = _cut(status, "relay", "state", "message", "reason", "database", "missing_roles", *_REMARKS)
    silent = tuple(name for name in status.silent if len(name) <= _LONGEST_NAME)[:_MOST_SILENT]
    return replace(cut, subscriptions=kept, silent=silent, peers=(), outbox="")


def _bounded_subscription(status: SubscriptionStatus, count: int) -> SubscriptionStatus:
    owned, orphans = (
        tuple(replace(each, last_error=None) for each in given if 0 <= each.partition < count)[:count]
        for given in (status.owned, status.orphans)
    )
    owners = {
        number: owner
        for number, owner in status.owners.items()
        if 0 <= number < count and len(owner or "") <= _LONGEST_NAME
    }
    cut = _cut(status, "sink", "state", "last_error", "reason")
    return replace(cut, owned=owned, orphans=orphans, owners=owners)


def _cut(status: Reported, *fields: str) -> Reported:
    long: dict[str, Any] = {
        field: text[:_LONGEST_TEXT] for field in fields if len(text := getattr(status, field) or "") > _LONGEST_TEXT
    }
    return replace(status, **long) if long else status
