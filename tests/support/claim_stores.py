"""Types of the fixtures for claim stores."""

from __future__ import annotations

from typing import Any, Protocol

from mailboat.consumer.claims.redis_store import RedisClaims


class StoreFactory(Protocol):
    """Factory of open stores that are closed after the test: ``await store_at(server.url, lease=1)``."""

    async def __call__(self, url: str, **options: Any) -> RedisClaims: ...
