"""Events published so far, over the restarts of relays: each relay counts from its own start, the status goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """What one relay says."""

    published: int
    young: bool
    """Its pod was made while this operator was looking: nobody can have counted it before."""
    created: str = ""
    """When that was, as Kubernetes writes it."""


class Tally:
    """For all subscriptions."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Count]] = {}
        """By the subscription's uid: what each relay (by its pod's uid) had counted when it was last asked."""
        self._forgotten: dict[str, str] = {}
        """By the subscription's uid: when the youngest pod was made that is not asked any more. One that comes back (a
        label that was taken off and put on again) is no younger, and is not counted a second time."""
        self._total: dict[str, int] = {}

    def count(self, uid: str, before: int, counts: Mapping[str, Count], asked: Collection[str]) -> int:
        """The new total. ``before`` is the one in the status, where a new operator goes on; ``asked`` are all pods that
        there are, whether they answered or not: others are forgotten.

        What an old relay had published when this operator first asked it may be in the status already, and adds
        nothing, unless nothing was counted at all. A count that went down is a new process.
        """
        total = self._total.get(uid, before)
        known = self._last.get(uid, {})
        forgotten = [self._forgotten.get(uid, ""), *(each.created for pod, each in known.items() if pod not in asked)]
        newest = self._forgotten[uid] = max(forgotten)
        last = {pod: each for pod, each in known.items() if pod in asked}
        nothing_counted = total == 0
        for pod, count in counts.items():
            if pod in last:
                had = last[pod].published
                total += count.published - had if count.published >= had else count.published
            elif nothing_counted or (count.young and (not newest or count.created > newest)):
                total += count.published
            last[pod] = count
        self._last[uid] = last
        self._total[uid] = total
        return total

    def forget(self, uid: str) -> None:
        self._last.pop(uid, None)
        self._total.pop(uid, None)
        self._forgotten.pop(uid, None)
