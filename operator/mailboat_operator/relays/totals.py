"""Total of published events across relay restarts: each relay counts from its start, the status accumulates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Relay:
    """A relay that was polled."""

    created: str
    """Creation time of its pod, as Kubernetes writes it."""
    published: int | None
    """Published count in the last answer; None if it is unknown how much of it is already in the total."""


@dataclass(slots=True)
class _Counted:
    """State of one subscription."""

    total: int
    youngest: str
    """Creation time of the newest pod seen before this operator's first poll or removed since. Only a pod created later
    is certainly new; an older one may reappear (a label removed and added again)."""
    relays: dict[str, _Relay] = field(default_factory=dict)
    """By pod uid."""


class RestartTotals:
    """Published totals of all subscriptions."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}

    def count(self, uid: str, before: int, published: Mapping[str, int], asked: Mapping[str, str]) -> int:
        """Return the new total.

        ``before``: total in the status, from which a new operator continues. ``published``: counts that relays
        reported, by pod uid. ``asked``: all existing pods with their creation times; other pods are dropped.

        The first count of a relay may already be included in the status, so it adds nothing, unless its pod is new or
        the total is 0. A count that decreased means a new process.
        """
        counted = self._counted.get(uid)
        if counted is None:
            counted = self._counted[uid] = _Counted(before, youngest=max(asked.values(), default=""))
        for pod in counted.relays.keys() - asked.keys():
            counted.youngest = max(counted.youngest, counted.relays.pop(pod).created)
        for pod in asked.keys() - counted.relays.keys():
            new = counted.total == 0 or asked[pod] > counted.youngest
            counted.relays[pod] = _Relay(asked[pod], published=0 if new else None)
        for pod, now in published.items():
            relay = counted.relays[pod]
            had = now if relay.published is None else relay.published
            counted.total += now - had if now >= had else now
            relay.published = now
        return counted.total

    def forget(self, uid: str) -> None:
        self._counted.pop(uid, None)
