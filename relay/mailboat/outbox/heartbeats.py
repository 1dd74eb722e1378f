"""How long other relays have been silent, by this relay's own monotonic clock.

A heartbeat carries the time of the database's clock, and that clock may be set, or be another server's after a
failover. So the value is only compared for change: a relay is silent for as long as this process has seen the same
heartbeat. A silence from before the first look does not count, because the database itself may have been unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple


class Heartbeat(NamedTuple):
    """The last sign of life of one process. A new one differs from it."""

    incarnation: str
    at: datetime


class Heartbeats:
    """What this relay has seen of the heartbeats of all relays."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Heartbeat, float]] = {}

    def silences(self, latest: Mapping[str, Heartbeat], asked_at: float, answered_at: float) -> dict[str, float]:
        """Seconds without a change for each relay, never too many.

        A change counts from when its answer arrived, a silence up to when the question was sent. So an answer that was
        late, or that waited in a suspended process, makes no relay look silent.
        """
        self._seen = {
            relay: known if (known := self._seen.get(relay)) and known[0] == heartbeat else (heartbeat, answered_at)
            for relay, heartbeat in latest.items()
        }
        return {relay: max(0.0, asked_at - since) for relay, (_, since) in self._seen.items()}
