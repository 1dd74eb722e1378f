"""Bare ``SET NX`` as a claim store of the engine: the contrast to claims with two states. It loses events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio

from mailboat.consumer.broker.interfaces import Answer, Claim, Claimed, FailedAttempt, Finished


class BareClaims:
    """Marks an event before its handler runs, as helpers in the wild do. A failed event is unmarked."""

    def __init__(self, url: str, *, consumer: str) -> None:
        self._address = urlsplit(url)
        self._prefix = f"bare:{consumer}:"

    async def open(self) -> None:
        # With the retries that redis-py has by default; its ``from_url`` has none.
        self._redis: Any = redis.asyncio.Redis(host=self._address.hostname or "", port=self._address.port or 0)

    async def close(self) -> None:
        await self._redis.aclose()

    async def claim(self, claims: Sequence[Claim]) -> list[Answer]:
        return [
            Claimed(1) if await self._redis.set(self._prefix + each.event_id, "1", nx=True, ex=3600) else Finished()
            for each in claims
        ]

    async def done(self, event_ids: Sequence[str]) -> list[bool]:
        return [True] * len(event_ids)

    async def dead(self, event_ids: Sequence[str]) -> list[bool]:
        return [True] * len(event_ids)

    async def fail(self, failures: Sequence[FailedAttempt]) -> list[bool]:
        await self.release([each.event_id for each in failures])
        return [True] * len(failures)

    async def release(self, event_ids: Sequence[str]) -> None:
        await self._redis.delete(*(self._prefix + each for each in event_ids))
