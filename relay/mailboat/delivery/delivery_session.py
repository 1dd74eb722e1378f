"""The session as seen by partition workers, readers and the progress committer. `runtime.session` implements it.

The session owns the partitions, their leases and all tasks. The classes of this package never call each other across
partitions; they call the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from mailboat.store.outbox_store import CursorKey, Opened, Settlement

if TYPE_CHECKING:
    from mailboat.delivery.window_feeder import WindowFeeder


class DeliverySession(Protocol):
    """The connected period of a relay in which partitions are delivered."""

    def window_opened(self, opened: Opened) -> None:
        """Pass the events of a newly opened window to the workers of its partitions."""

    def lease_lost(self, key: CursorKey) -> None:
        """Stop the worker of a partition that another relay owns, without settling (G5)."""

    def lease_left(self) -> float:
        """Return the seconds for which this relay may publish under its leases."""

    def settle(self, settlement: Settlement) -> None:
        """Queue progress for the next tick."""

    async def commit(self, settlement: Settlement) -> None:
        """Queue progress and return after its commit."""

    def read(self, reader: WindowFeeder) -> None:
        """Start a reader as a task of the session."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task of the session. If it fails, the session ends with its error."""
