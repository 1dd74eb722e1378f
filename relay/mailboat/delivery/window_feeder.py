"""Readers of large and reopened windows, for all partitions that share one.

One statement reads for all members. A member may fall behind because of a slow or failing sink or a pause. As soon as
another member starves because of it, the slow member gets a separate reader, so it delays no other partition. The
members share reads again at the head of the log.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from mailboat.delivery.partition_worker import PartitionWorker
from mailboat.delivery.stream import Checkpoint, CheckpointHook, DeliverySession
from mailboat.store.outbox_store import CursorKey, OutboxStore, Window

SLOW_MEMBER_TIMEOUT = 0.2
"""Seconds that a starving member waits for the slowest one."""


@dataclass(eq=False)
class WindowFeeder:
    """Reader of one window for some partitions, from a position on."""

    store: OutboxStore
    window: Window
    members: dict[CursorKey, PartitionWorker]
    session: DeliverySession
    on_checkpoint: CheckpointHook

    def __post_init__(self) -> None:
        self._after = min((worker.read_upto for worker in self.members.values()), default=0)

    async def run(self) -> None:
        """Read to the end of the window, or until no member is left."""
        while self.members:
            await self._until_room()
            if not self.members:
                return
            leases = [worker.lease for worker in self.members.values()]
            crash_count = max(worker.crash_count for worker in self.members.values())
            chunk = await self.store.read(self.window, leases, self._after, crash_count=crash_count)
            self.on_checkpoint(Checkpoint.CHUNK_READ)
            for key, worker in self.members.items():
                worker.offer(self.window, chunk.events.get(key, ()), chunk.reached, chunk.last)
            self._after = chunk.reached
            if chunk.last:
                return

    async def _until_room(self) -> None:
        while full := {key: worker for key, worker in self.members.items() if not worker.room.is_set()}:
            with suppress(TimeoutError):
                async with asyncio.timeout(SLOW_MEMBER_TIMEOUT):
                    for worker in full.values():
                        await worker.room.wait()
            full = {key: worker for key, worker in full.items() if key in self.members and not worker.room.is_set()}
            if full and any(worker.starving for worker in self.members.values()):
                for key in full:
                    del self.members[key]
                self.session.read(WindowFeeder(self.store, self.window, full, self.session, self.on_checkpoint))
