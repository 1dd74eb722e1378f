"""Bare ``SET NX`` as a claim store of the engine, which loses events. Contrast to claims with two states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio

from mailboat.consumer.broker.interfaces import Claim, Claimed, ClaimReply, FailedAttempt, Finished


class BareClaims:
    """Claim store that marks an event before its handler runs, as in many applications. A failed event is unmarked."""

    def __init__(self, url: str, *, consumer: str) -> None:
        self._address = urlsplit(url)
        self._prefix = f"bare:{consumer}:"

    async def open(self) -> None:
        # redis-py retries by default, but its ``from_url`` does not.
        self._redis: Any = redis.asyncio.Redis(host=self._address.hostname or "", port=self._address.port or 0)

    async def close(self) -> None:
        await self._redis.aclose()

    async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]:
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
