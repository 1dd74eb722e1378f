"""Status of a consumer process: /livez, /readyz, /status and /metrics, as on a relay."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from mailboat.consumer.dispatch import Counts
from mailboat.consumer.pull_source import PullSource
from mailboat.consumer.watch import Watch
from mailboat.http.consumer_surface import ConsumerStatus, ConsumerSurface
from mailboat.http.server import HttpServer, parse_address


@dataclass(frozen=True, slots=True)
class Health:
    """Builds the status from values in memory, without queries."""

    subscription: str
    instance: str
    source: PullSource
    watch: Watch
    counts: Counts
    stop: asyncio.Event

    def status(self) -> ConsumerStatus:
        lag = self.watch.lag
        state = "Stopping" if self.stop.is_set() else "Running" if self.source.connected else "Connecting"
        return ConsumerStatus(
            name=self.subscription,
            instance=self.instance,
            state=state,
            message=self.source.trouble or "",
            workers=self.source.connected,
            lag=lag.pending,
            lag_bounded=lag.bounded,
            oldest_age=lag.oldest,
            parked=lag.parked,
            dead=lag.dead,
            handled=self.counts.handled,
            ignored=self.counts.ignored,
            refused=self.counts.refused,
            redelivered=self.counts.redelivered,
            last_error=self.counts.last_error,
        )

    async def listen(self, address: str) -> Any:
        server = HttpServer.bind(*parse_address(address))
        await server.start(ConsumerSurface(self.status))
        return server
