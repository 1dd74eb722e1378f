"""Total of a counter across restarts: each consumer counts from its start, the status accumulates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Pod:
    """A pod that was polled."""

    created: str
    """Creation time of its pod, as Kubernetes writes it."""
    count: int | None
    """Count in the last answer; None if it is unknown how much of it is already in the total."""


@dataclass(slots=True)
class _Counted:
    """State of one subscription."""

    total: int
    youngest: str
    """Creation time of the newest pod seen before this operator's first poll or removed since. Only a pod created later
    is certainly new; an older one may reappear (a label removed and added again)."""
    pods: dict[str, _Pod] = field(default_factory=dict)
    """By pod uid."""


class RestartTotals:
    """Totals of one counter for all subscriptions."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}

    def count(self, uid: str, before: int, counts: Mapping[str, int], existing: Mapping[str, str]) -> int:
        """Return the new total.

        ``before``: total in the status, from which a new operator continues. ``counts``: reported
        counts by pod uid. ``existing``: all existing pods with their creation times; other pods are dropped.

        The first count of a pod may already be included in the status, so it adds nothing, unless its pod is new or
        the total is 0. A count that decreased means a new process.
        """
        counted = self._counted.get(uid)
        if counted is None:
            counted = self._counted[uid] = _Counted(before, youngest=max(existing.values(), default=""))
        for pod in counted.pods.keys() - existing.keys():
            counted.youngest = max(counted.youngest, counted.pods.pop(pod).created)
        for pod in existing.keys() - counted.pods.keys():
            new = counted.total == 0 or existing[pod] > counted.youngest
            counted.pods[pod] = _Pod(existing[pod], count=0 if new else None)
        for pod, now in counts.items():
            entry = counted.pods[pod]
            previous = now if entry.count is None else entry.count
            counted.total += now - previous if now >= previous else now
            entry.count = now
        return counted.total

    def forget(self, uid: str) -> None:
        self._counted.pop(uid, None)
