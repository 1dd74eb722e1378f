"""Claims in Redis: `.venv/bin/python bench/claims.py [events]` prints one table.

Rows alternate over several rounds in one run against one Valkey, and the best round of each counts. The rows are a bare
``SET NX EX`` awaited per event, as in many applications; the claims of Mailboat, many keys per call; and claim with
done. Events have ids of 36 characters.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

import redis.asyncio

from mailboat.consumer.broker.interfaces import Claim, Claimed
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat_devservers.redis_server import RedisServer, start_valkey

_ROUNDS = 5
_BARE_SHARE = 5
"""Divisor of the events for bare calls, which are slow: a fifth of the events gives their rate."""


async def _bare(client: redis.asyncio.Redis, ids: list[str]) -> None:
    for event_id in ids:
        await client.set(f"bare:billing:{event_id}", "1", nx=True, ex=2_592_000)


async def _claims(store: RedisClaims, ids: list[str], at_once: int, *, done: bool) -> None:
    for first in range(0, len(ids), at_once):
        batch = ids[first : first + at_once]
        answers = await store.claim([Claim(event_id) for event_id in batch])
        assert answers == [Claimed(1)] * len(batch)
        if done:
            await store.done(batch)


async def measure(server: RedisServer, events: int) -> dict[str, float]:
    """Return events per second by row, the best of all rounds."""
    client = redis.asyncio.Redis(port=server.port)
    store = RedisClaims(server.url, consumer="billing")
    await store.open()
    rows: dict[str, tuple[int, Callable[[list[str]], Awaitable[None]]]] = {
        "bare SET NX, one awaited call per event": (events // _BARE_SHARE, lambda ids: _bare(client, ids)),
        "claims, 500 per call": (events, lambda ids: _claims(store, ids, 500, done=False)),
        "claim and done, 500 per call": (events, lambda ids: _claims(store, ids, 500, done=True)),
        "claim and done, 32 per call": (events // 2, lambda ids: _claims(store, ids, 32, done=True)),
        "claim and done, 1 per call": (events // _BARE_SHARE, lambda ids: _claims(store, ids, 1, done=True)),
    }
    best: dict[str, float] = {}
    for _ in range(_ROUNDS):
        for name, (number, work) in rows.items():
            await client.flushdb()
            ids = [str(uuid4()) for _ in range(number)]
            began = time.perf_counter()
            await work(ids)
            best[name] = max(best.get(name, 0.0), number / (time.perf_counter() - began))
            store._renewal.drop(ids)
    await store.close()
    await client.aclose()
    return best


def main(events: int) -> None:
    with start_valkey() as server:
        rates = asyncio.run(measure(server, events))
    bare = next(iter(rates.values()))
    print(f"{'':44}{'events/s':>10}{'times bare':>12}")
    for name, rate in rates.items():
        print(f"{name:44}{rate:>10,.0f}{rate / bare:>12.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
