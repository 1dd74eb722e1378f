"""Lag of the subscriptions that a session delivers or reports, as of the last query."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from mailboat.delivery.stream import Clock
from mailboat.errors import MailboatError
from mailboat.store.outbox_store import Backlog, OutboxStore, Subscription

log = logging.getLogger(__name__)

_SELDOM = 5
"""Number of intervals between two queries for an idle subscription."""


@dataclass(eq=False)
class LagProbe:
    """Queries the lag of one subscription at a time, of an idle one less often. Delivery does not depend on it."""

    store: OutboxStore
    clock: Clock
    every: float
    backlogs: dict[int, Backlog] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    """Subscriptions whose last query failed; their entry in ``backlogs`` is older."""
    _probed_at: dict[int, float] = field(default_factory=dict)

    async def query(self, subscription: Subscription, *, idle: bool) -> None:
        number = subscription.number
        if idle and self.clock() - self._probed_at.get(number, -math.inf) < self.every * _SELDOM:
            return
        try:
            self.backlogs[number] = await self.store.backlog(number)
            self.errors.pop(number, None)
        except MailboatError as error:  # other tasks detect a database outage
            if number not in self.errors:
                log.warning("Lag query failed: %s", error, extra={"subscription": subscription.name})
            self.errors[number] = str(error)
        self._probed_at[number] = self.clock()

    def forget(self, number: int) -> None:
        self.backlogs.pop(number, None)
        self.errors.pop(number, None)
        self._probed_at.pop(number, None)
