"""Events published so far, over the restarts of relays: each relay counts from its own start, the status goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Relay:
    """One that was met."""

    created: str
    """When its pod was made, as Kubernetes writes it."""
    published: int | None
    """What it had published when it last answered; None: it is not known how much of that is counted already."""


@dataclass(slots=True)
class _Counted:
    """Of one subscription."""

    total: int
    youngest: str
    """When the youngest pod was made that was there before this operator looked, or is asked no more. Only one that
    is younger is new for certain: others may come back (a label that was taken off and put on again)."""
    relays: dict[str, _Relay] = field(default_factory=dict)
    """By the uid of their pods."""


class Tally:
    """For all subscriptions."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}

    def count(self, uid: str, before: int, published: Mapping[str, int], asked: Mapping[str, str]) -> int:
        """The new total. ``before`` is the one in the status, where a new operator goes on; ``published`` is what
        relays answered; ``asked`` are all pods that there are and when each was made: others are forgotten.

        What a relay had published when it was first met may be in the status already, and adds nothing, unless its pod
        is new or nothing was counted at all. A count that went down is a new process.
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
