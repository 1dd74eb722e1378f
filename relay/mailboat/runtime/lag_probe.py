"""Lag of the subscriptions that a session delivers or reports, as of the last query."""

from __future__ import annotations

import logging

from mailboat.delivery.stream import Clock
from mailboat.errors import MailboatError
from mailboat.store.outbox_store import Backlog, OutboxStore, Subscription

log = logging.getLogger(__name__)

_SELDOM = 5
"""Number of intervals between two queries for an idle subscription."""


class LagProbe:
    """Queries the lag of one subscription at a time. Delivery does not depend on it."""

    def __init__(self, store: OutboxStore, clock: Clock, every: float) -> None:
        self.backlogs: dict[int, Backlog] = {}
        self.errors: dict[int, str] = {}
        """Subscriptions whose last query failed; their entry in ``backlogs`` is older."""
        self._store = store
        self._clock = clock
        self._seldom = every * _SELDOM
        self._probed_at: dict[int, float] = {}

    async def query(self, subscription: Subscription, *, idle: bool) -> None:
        """Query the lag of a subscription, less often if the subscription is idle."""
        number = subscription.number
        if idle and self._clock() - self._probed_at.get(number, -self._seldom) < self._seldom:
            return
        try:
            self.backlogs[number] = await self._store.backlog(number)
            self.errors.pop(number, None)
        except MailboatError as error:  # other tasks detect a database outage
            if number not in self.errors:
                log.warning("Lag query failed: %s", error, extra={"subscription": subscription.name})
            self.errors[number] = str(error)
        self._probed_at[number] = self._clock()

    def forget(self, number: int) -> None:
        """Discard the lag of a subscription that this session no longer delivers."""
        self.backlogs.pop(number, None)
        self.errors.pop(number, None)
        self._probed_at.pop(number, None)
