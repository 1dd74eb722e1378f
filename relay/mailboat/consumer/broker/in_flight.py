"""Events that the engine has received and not settled: where each of them is.

An event waits in its lane (``lanes``), or the engine holds it (``held``): it is being claimed, claimed, handled, marked
or dead_lettered. Only the event loop changes this state.
"""

import asyncio
from collections import deque
from collections.abc import Collection

from mailboat.consumer.broker.lanes import Lanes
from mailboat.consumer.broker.work import FOREVER, Work
from mailboat.consumer.broker.workers import IdleWorkers


class InFlight:
    """All events of one engine, and the wake-ups of the tasks that wait for one."""

    def __init__(self, idle: IdleWorkers, *, with_claims: bool) -> None:
        self.lanes = Lanes()
        self.claiming: set[Work] = set()
        """Asked for at the claim store."""
        self.claimed: deque[Work] = deque()
        """Claimed and not started; without a claim store unused."""
        self.claim_below = 0
        """Number of these events at which the next ones are claimed."""
        self.held: set[Work] = set()
        """Taken from the lanes."""
        self.ids: set[str] = set()
        """Event ids that this process holds a claim of."""
        self.suspect: Work | None = None
        """Claimed event that is handled alone, because its consumers died."""
        self.suspect_started = False
        self.pending_dead_letters: set[Work] = set()
        """Waits for its dead letter to be acknowledged."""
        self.stopped: str | None = None
        """Reason for which events do not start until a person acts."""
        self.ending = False
        """The process ends: events do not start."""
        self.claim_wake = asyncio.Event()
        self._idle = idle
        self._with_claims = with_claims
        self._removed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A lane has a ready head, or a worker is free."""
        if self._with_claims:
            self.claim_wake.set()
        else:
            self.wake_worker()

    def wake_worker(self) -> None:
        if self.claimed if self._with_claims else self.lanes.ready:
            self._idle.wake()

    # -- parked lanes ------------------------------------------------------------------------------------------------

    def park(self, work: Work, seconds: float, cause: str) -> None:
        """Let a lane wait; its head becomes ready by a timer. ``FOREVER``: until a person acts."""
        loop = asyncio.get_running_loop()
        self.lanes.park(work, loop.time() + seconds, cause)
        due = self.lanes.next_due
        assert due is not None
        if due != FOREVER and (self._timer is None or due < self._timer.when()):
            self.stop_timer()
            self._timer = loop.call_at(due, self._release_due)

    def _release_due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self.lanes.release_due(loop.time()):
            self.wake()
        due = self.lanes.next_due
        if due is not None and due != FOREVER:
            self._timer = loop.call_at(due, self._release_due)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- held events -------------------------------------------------------------------------------------------------

    def remove(self, work: Work) -> None:
        """The engine no longer holds the event."""
        self.held.discard(work)
        self.pending_dead_letters.discard(work)
        if work is self.suspect:
            self.suspect = None
        if work.id:
            self.ids.discard(work.id)
        self._removed.set()
        if self._with_claims:
            self.claim_wake.set()

    async def drained(self, partitions: Collection[int], within: float) -> bool:
        """Wait until no event of these partitions is held; return False after ``within`` seconds."""
        deadline = asyncio.get_running_loop().time() + within
        while any(work.record.partition in partitions and not work.detached for work in self.held):
            self._removed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._removed.wait()
            except TimeoutError:
                return False
        return True

    def detach(self, partitions: Collection[int]) -> None:
        """Results of held events of these partitions are not reported to the source."""
        for work in self.held:
            work.detached = work.detached or work.record.partition in partitions
