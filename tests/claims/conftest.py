"""Claim stores with unique keys on the shared servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat_devservers.redis_server import RedisServer
from support.claim_stores import StoreFactory


@pytest.fixture
def consumer(unique_name: Callable[[str], str]) -> str:
    return unique_name("billing")


@pytest_asyncio.fixture
async def store_at(consumer: str) -> AsyncIterator[StoreFactory]:
    """``await store_at(server.url, lease=1)`` opens a store, closed after the test. All stores share a consumer."""
    stores: list[RedisClaims] = []

    async def open_store(url: str, **options: Any) -> RedisClaims:
        store = RedisClaims(url, **{"consumer": consumer, "prefix": "test", "instance": "me", **options})
        stores.append(store)
        await store.open()
        return store

    yield open_store
    for store in stores:
        await store.close()


@pytest_asyncio.fixture
async def store(each_redis: RedisServer, store_at: StoreFactory) -> RedisClaims:
    return await store_at(each_redis.url, life="b")
