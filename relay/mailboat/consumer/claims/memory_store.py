"""Claims in memory, for ``idempotency: none``: attempts are counted in this process, and nothing is remembered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from mailboat.consumer.broker.protocol import Answer, Busy, Claim, Claimed, Failure

log = logging.getLogger(__name__)

_HELD: Final = 1.0
_MOST_FAILED: Final = 100_000
"""Failed events to remember. Events whose partition moved to another consumer are never asked for again."""


class MemoryClaims:
    """A ClaimStore without a server. A redelivered event is handled again, and a restart forgets its attempts."""

    def __init__(self, *, consumer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._consumer = consumer
        self._clock = clock
        self._running: dict[str, int] = {}
        self._failed: dict[str, tuple[float, int]] = {}

    async def open(self) -> None:
        log.warning(
            "Idempotency is off: events that are delivered twice are handled twice, and attempts are counted in memory",
            extra={"consumer": self._consumer},
        )

    async def claim(self, claims: Sequence[Claim]) -> list[Answer]:
        return [self._claim(claim.event_id) for claim in claims]

    def _claim(self, event_id: str) -> Answer:
        if event_id in self._running:
            return Busy(_HELD)
        due, attempts = self._failed.get(event_id, (float("-inf"), 0))
        if (wait := due - self._clock()) > 0:
            return Busy(wait)
        self._failed.pop(event_id, None)
        self._running[event_id] = attempts + 1
        return Claimed(attempts + 1)

    async def done(self, event_ids: Sequence[str]) -> list[bool]:
        return [self._running.pop(event_id, None) is not None for event_id in event_ids]

    async def dead(self, event_ids: Sequence[str]) -> list[bool]:
        return await self.done(event_ids)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return [self._fail(failure) for failure in failures]

    def _fail(self, failure: Failure) -> bool:
        attempt = self._running.pop(failure.event_id, None)
        if attempt is None:
            return False
        self._failed[failure.event_id] = (self._clock() + failure.retry_in, attempt - (not failure.counted))
        if len(self._failed) > _MOST_FAILED:
            del self._failed[next(iter(self._failed))]
        return True

    async def release(self, event_ids: Sequence[str]) -> None:
        await self.fail([Failure(event_id, 0.0, counted=False) for event_id in event_ids])

    async def close(self) -> None:
        self._running.clear()
