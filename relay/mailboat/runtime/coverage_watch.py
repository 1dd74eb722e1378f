"""The periodic examination of an outbox by a relay: its filters, and the oldest snapshot of its database.

The results are in the status, in metrics and, once per change, in the log. The connection is open only during an
examination, and a failure affects nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from mailboat.errors import MailboatError
from mailboat.store.connection import PostgresConnection, UrlProvider
from mailboat.store.coverage import Coverage, coverage
from mailboat.store.old_snapshots import OldSnapshot, SnapshotWatch
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, Pooler

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between examinations."""


class CoverageWatch:
    """Examination task of one outbox."""

    def __init__(
        self,
        url: UrlProvider,
        layout: TableLayout,
        pooler: Pooler,
        subscriptions: Callable[[], Sequence[EventSubscription]],
        *,
        every: float = EVERY,
    ) -> None:
        self.found = Coverage()
        self.snapshot = OldSnapshot()
        self._snapshots = SnapshotWatch()
        self._url = url
        self._layout = layout
        self._pooler = pooler
        self._subscriptions = subscriptions
        self._every = every
        self._logged: frozenset[str] = frozenset()
        """Types and subscriptions that were logged."""

    async def run(self) -> None:
        """Examine the outbox until cancelled."""
        while True:
            await asyncio.sleep(self._every)
            try:
                link = await PostgresConnection.open(self._url, "coverage", pooler=self._pooler)
                try:
                    await self._examine_snapshot(link)
                    self.found = await coverage(link, self._layout, self._subscriptions())
                finally:
                    await link.close()
            except MailboatError as error:
                log.debug("The outbox was not examined: %s", error)
                continue
            subjects = frozenset((*self.found.unmatched, *self.found.idle))
            if subjects - self._logged:
                for remark in self.found.remarks():
                    log.warning("Probably a mistake in a filter: %s", remark, extra={"outbox": self._layout.table})
            self._logged = subjects

    async def _examine_snapshot(self, link: PostgresConnection) -> None:
        before, self.snapshot = self.snapshot, await self._snapshots.oldest(link)
        if self.snapshot.warning and not before.warning:
            log.warning("Old snapshot: %s", self.snapshot.warning, extra={"outbox": self._layout.table})
