"""Results on their way to the claim store: done, failed, dead, released.

Results of many handlers are written in one call. While the store is unavailable the results wait, and with them the
lanes: the next event of a key starts only after the result of the last one is stored. With ``wait`` False the engine
continues without the store, and the event is not remembered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from mailboat.consumer.broker.availability import Availability
from mailboat.consumer.broker.protocol import ClaimStore, ClaimsUnavailable, Failure
from mailboat.consumer.broker.work import Lifecycle, Mark, Work


class Marks:
    """Writes results in batches. ``run`` is one task of the engine."""

    def __init__(self, claims: ClaimStore, availability: Availability, lifecycle: Lifecycle, *, wait: bool) -> None:
        self._claims = claims
        self._availability = availability
        self._lifecycle = lifecycle
        self._wait = wait
        self._pending: deque[tuple[Work, Mark, Failure | None]] = deque()
        self._wake = asyncio.Event()

    def add(self, work: Work, mark: Mark, retry_in: float = 0.0, *, counted: bool = True) -> None:
        """Queue a result. ``Lifecycle.marked`` is called after it is stored."""
        failure = Failure(work.id, retry_in, counted) if mark is Mark.FAILED else None
        self._pending.append((work, mark, failure))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, deque()
            for mark in Mark:
                if chosen := [each for each in batch if each[1] is mark]:
                    await self._write(mark, chosen)

    async def _write(self, mark: Mark, chosen: Sequence[tuple[Work, Mark, Failure | None]]) -> None:
        ids = [work.id for work, _, _ in chosen]
        while True:
            try:
                match mark:
                    case Mark.DONE:
                        kept = await self._claims.done(ids)
                    case Mark.FAILED:
                        kept = await self._claims.fail([failure for _, _, failure in chosen if failure is not None])
                    case Mark.DEAD:
                        kept = await self._claims.dead(ids)
                    case Mark.RELEASED:
                        await self._claims.release(ids)
                        kept = [True] * len(ids)
                self._availability.succeeded()
                break
            except ClaimsUnavailable as error:
                delay = self._availability.failed(str(error))
                if not self._wait:
                    kept = [True] * len(ids)
                    break
                await asyncio.sleep(delay)
        for (work, _, failure), ours in zip(chosen, kept, strict=True):
            work.claimed = False
            self._lifecycle.marked(work, mark, failure.retry_in if failure else 0.0, ours=ours)
