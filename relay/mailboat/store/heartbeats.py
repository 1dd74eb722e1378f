"""Silence of other relays, measured by this relay's monotonic clock.

A heartbeat carries the database's time. That clock may be set, or belong to another server after a failover, so
heartbeats are only compared for equality: a relay is silent for as long as this process reads the same heartbeat.
Silence before the first read does not count, because the database itself may have been unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Heartbeat(NamedTuple):
    """Last heartbeat of one process. Every new heartbeat differs from the previous one."""

    incarnation: str
    at: str
    """The database's time, as text."""


class Heartbeats:
    """Heartbeats of all relays, as read by this relay."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Heartbeat, float]] = {}

    def silences(self, latest: Mapping[str, Heartbeat], sent_at: float, answered_at: float) -> dict[str, float]:
        """Return the seconds without a change for each relay, as a lower bound.

        A change counts from the arrival of the result, a silence up to the sending of the query. A result that is late,
        or that waited in a suspended process, therefore never makes a relay appear silent.
        """
        self._seen = {
            relay: seen if (seen := self._seen.get(relay)) and seen[0] == heartbeat else (heartbeat, answered_at)
            for relay, heartbeat in latest.items()
        }
        return {relay: max(0.0, sent_at - since) for relay, (_, since) in self._seen.items()}
