"""``Once`` in an application's own loop, with synchronous and asynchronous clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from mailboat import ClaimHeld, Once
from mailboat.consumer.broker.interfaces import ClaimsUnavailable
from mailboat_devservers.redis_server import RedisServer
from support.wait import await_until


@pytest_asyncio.fixture
async def once(each_redis: RedisServer, consumer: str) -> AsyncIterator[Once]:
    client = redis.asyncio.Redis(port=each_redis.port)
    yield Once(client, consumer=consumer, prefix="test", lease=0.3)
    await client.aclose()


@pytest.fixture
def once_sync(each_redis: RedisServer, consumer: str) -> Iterator[Once]:
    client = redis.Redis(port=each_redis.port, decode_responses=True)
    yield Once(client, consumer=consumer, prefix="test", lease=0.3)
    client.close()


async def test_an_event_is_handled_once_across_both_forms(
    once: Once, once_sync: Once, each_redis: RedisServer, consumer: str
) -> None:
    claim = once.claim("e1")

    async def fails() -> None:
        async with claim as first:
            assert first
            raise RuntimeError("the next attempt counts")

    def is_interrupted() -> None:
        with once_sync.claim("e1") as first:
            assert first
            raise KeyboardInterrupt  # the claim is released, so the attempt does not count

    with pytest.raises(RuntimeError):
        await fails()
    assert claim.attempt == 1
    with pytest.raises(KeyboardInterrupt):
        is_interrupted()
    again = once_sync.claim("e1")
    with again as first:
        assert first
        assert again.attempt == 2
        with pytest.raises(ClaimHeld, match="don't acknowledge it") as held:
            async with once.claim("e1"):
                pass
        assert 0 < held.value.seconds <= 0.3
    async with once.claim("e1") as first:
        assert not first
    with once_sync.claim("e1") as first:
        assert not first
    each_redis.client().set(f"test:{consumer}:e2", "1")  # a key of an older SETNX helper
    with once_sync.claim("e2") as first:
        assert not first


async def test_leases_are_renewed_in_both_forms(
    once: Once, once_sync: Once, each_redis: RedisServer, consumer: str
) -> None:
    def value() -> str | None:
        return each_redis.client().get(f"test:{consumer}:e1")  # type: ignore[return-value]

    async with once.claim("e1"):
        first = value()
        await await_until(lambda: value() != first)
    each_redis.client().delete(f"test:{consumer}:e1")
    with once_sync.claim("e1"):
        first = value()
        await await_until(lambda: value() != first)
    assert value() == "d"


async def test_a_cancelled_block_gives_its_event_back(once: Once, each_redis: RedisServer, consumer: str) -> None:
    began = asyncio.Event()

    async def block() -> None:
        async with once.claim("e1"):
            began.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not each_redis.client().exists(f"test:{consumer}:e1")


def test_an_unavailable_server_is_named_so(once_sync: Once) -> None:
    away = Once(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)), consumer="billing")
    with pytest.raises(ClaimsUnavailable, match="can't be reached"), away.claim("e1"):
        pass


def test_importing_mailboat_does_not_import_redis() -> None:
    program = "import sys, mailboat; print('redis' in sys.modules); mailboat.Once; print('redis' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["False", "False"]
