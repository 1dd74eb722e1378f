"""Types of the fixtures for claim stores."""

from __future__ import annotations

from typing import Any, Protocol

from mailboat.consumer.claims.redis_store import RedisClaims


class StoreFactory(Protocol):
    """``await store_at(server.url, lease=1)``: an open store, closed after the test."""

    async def __call__(self, url: str, **options: Any) -> RedisClaims: ...
