"""Results on their way to the claim store: done, failed, dead, released.

Results of many handlers are written in one call. While the store is unavailable the results wait, and with them the
lanes: the next event of a key starts only after the result of the last one is stored. With ``wait`` False the engine
continues without the store, and the event is not remembered.
"""

import asyncio
from collections.abc import Sequence

from mailboat.consumer.broker.availability import Availability
from mailboat.consumer.broker.interfaces import ClaimStore, ClaimsUnavailable, FailedAttempt
from mailboat.consumer.broker.work import FAILED, Lifecycle, Mark, Work


class ClaimResults:
    """Writes results in batches. ``run`` is one task of the engine."""

    def __init__(self, claims: ClaimStore, availability: Availability, lifecycle: Lifecycle, *, wait: bool) -> None:
        self._claims = claims
        self._availability = availability
        self._lifecycle = lifecycle
        self._wait = wait
        self._pending: dict[Mark, list[Work]] = {mark: [] for mark in Mark}
        self._failures: dict[Work, FailedAttempt] = {}
        """Those of pending FAILED."""
        self._wake = asyncio.Event()

    def add(self, work: Work, mark: Mark, retry_in: float = 0.0, *, counted: bool = True) -> None:
        """Queue a result. ``Lifecycle.marked`` is called after it is stored."""
        self._pending[mark].append(work)
        if mark is FAILED:
            self._failures[work] = FailedAttempt(work.id, retry_in, counted)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, {mark: [] for mark in self._pending}
            for mark, works in batch.items():
                if works:
                    await self._write(mark, works)

    async def _write(self, mark: Mark, works: Sequence[Work]) -> None:
        ids = [work.id for work in works]
        while True:
            try:
                match mark:
                    case Mark.DONE:
                        results = await self._claims.done(ids)
                    case Mark.FAILED:
                        results = await self._claims.fail([self._failures[work] for work in works])
                    case Mark.DEAD:
                        results = await self._claims.dead(ids)
                    case Mark.RELEASED:
                        await self._claims.release(ids)
                        results = [True] * len(ids)
                self._availability.succeeded()
                break
            except ClaimsUnavailable as error:
                delay = self._availability.failed(str(error))
                if not self._wait:
                    results = [True] * len(ids)
                    break
                await asyncio.sleep(delay)
        marked = self._lifecycle.marked
        for work, held in zip(works, results, strict=True):
            work.claimed = False
            marked(work, mark, self._failures.pop(work).retry_in if mark is FAILED else 0.0, held=held)
