"""The sink of pull subscriptions: nothing is published, since consumers take the events out of the database themselves.

A relay keeps it in place of a destination, declares the subscription and reports its lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from mailboat.errors import EventRefused
from mailboat.events import Outgoing
from mailboat.sinks.protocol import Failures, SinkContext, Traits


class PullSink:
    """Stands where a destination would be. ``publish`` is never called: relays own no partition of these."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=True)

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """From ``mailboat_spec.PullSink``, which has no settings."""
        return cls()

    async def open(self) -> None:
        """There is nothing to connect to."""

    def refusal(self, message: Outgoing) -> EventRefused | None:
        return None

    async def publish(self, batch: Sequence[Outgoing]) -> Failures:
        raise NotImplementedError("a relay delivers nothing of a pull subscription")

    async def close(self) -> None:
        """There is nothing to let go of."""
