"""Readers of large and reopened windows, for all partitions that share one.

One statement reads for all members. A member may fall behind because of a slow or failing sink or a pause. As soon as
another member starves because of it, the slow member gets a separate reader, so it delays no other partition. The
members share reads again at the head of the log.
"""

import asyncio
from collections.abc import Mapping

from mailboat.delivery.partition_worker import PartitionWorker
from mailboat.delivery.stream import Checkpoint, CheckpointHook, DeliverySession
from mailboat.store.outbox_store import CursorKey, OutboxStore, Window

SLOW_MEMBER_TIMEOUT = 0.2
"""Seconds that a starving member waits for the slowest one."""


class WindowFeeder:
    """Reader of one window for some partitions, from a position on."""

    def __init__(
        self,
        store: OutboxStore,
        window: Window,
        members: Mapping[CursorKey, PartitionWorker],
        session: DeliverySession,
        on_checkpoint: CheckpointHook,
    ) -> None:
        self.window = window
        self.members = dict(members)
        self._store = store
        self._session = session
        self._on_checkpoint = on_checkpoint
        self._after = min((worker.read_upto for worker in members.values()), default=0)

    def leave(self, key: CursorKey) -> None:
        self.members.pop(key, None)

    async def run(self) -> None:
        """Read to the end of the window, or until no member is left."""
        while self.members:
            await self._until_room()
            if not self.members:
                return
            leases = [worker.lease for worker in self.members.values()]
            crash_count = max(worker.crash_count for worker in self.members.values())
            chunk = await self._store.read(self.window, leases, self._after, crash_count=crash_count)
            self._on_checkpoint(Checkpoint.CHUNK_READ)
            for key, worker in self.members.items():
                worker.offer(self.window, chunk.events.get(key, ()), chunk.reached, chunk.last)
            self._after = chunk.reached
            if chunk.last:
                return

    async def _until_room(self) -> None:
        while full := {key: worker for key, worker in self.members.items() if not worker.room.is_set()}:
            waits = [asyncio.ensure_future(worker.room.wait()) for worker in full.values()]
            try:
                await asyncio.wait(waits, timeout=SLOW_MEMBER_TIMEOUT)
            finally:
                for wait in waits:
                    wait.cancel()
            full = {key: worker for key, worker in full.items() if key in self.members and not worker.room.is_set()}
            if full and any(worker.starving for worker in self.members.values()):
                for key in full:
                    del self.members[key]
                self._session.read(WindowFeeder(self._store, self.window, full, self._session, self._on_checkpoint))
