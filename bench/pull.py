"""Consumers without a broker: `mailboat.Consumer` with an empty handler, beside a plain queue table with SKIP LOCKED.

Both take events of the same size in transactions of the same number of events. The plain table is the common
hand-written queue: rows are deleted as they are taken, with no order of keys, no attempts and no other subscriber.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import psycopg
from latency import Latency
from measurement import Measured, Stopwatch

from mailboat import Consumer, Event, emit

_PLAIN = (
    "create table public.queue as select id, event_id, event_type, key, payload from mailboat.outbox"
    " order by id limit %s"
)
_GROUP = (
    "insert into mailboat.outbox (event_type, key, payload)"
    " select 'x', %s, convert_to(repeat('x', 200), 'UTF8') from generate_series(1, %s)"
)
_TAKE = (
    "delete from public.queue where id = any (array("
    " select id from public.queue order by id limit %s for update skip locked))"
    " returning event_id, event_type, key, payload"
)


def fill_groups(url: str, events: int, size: int) -> None:
    """Write a backlog in transactions of ``size`` events, each of one key."""
    with psycopg.connect(url) as connection:
        for number in range(events // size):
            connection.execute(_GROUP, (str(number), size))
            connection.commit()
        connection.execute("analyze mailboat.outbox")


def pull(url: str, events: int, at_once: int, grouped: bool) -> Measured:
    """Handle a number of events of a larger backlog, in one process."""
    return asyncio.run(_pull(url, events, at_once, grouped))


def pull_beside_a_failing_key(url: str, events: int) -> tuple[Measured, Measured]:
    """Measure the other keys without, and with, a key whose events always fail. Two runs of each alternate."""
    logging.getLogger("mailboat.consumer").setLevel(logging.CRITICAL)
    found = [asyncio.run(_pull(url, events, 100, False, failing)) for failing in (None, "order-7") * 2]
    return _sum(found[0], found[2]), _sum(found[1], found[3])


def _sum(one: Measured, two: Measured) -> Measured:
    cpu_seconds = one.cpu_seconds + two.cpu_seconds
    return Measured(one.events + two.events, one.seconds + two.seconds, cpu_seconds, two.memory)


async def _pull(url: str, events: int, at_once: int, grouped: bool, failing: str | None = None) -> Measured:
    delivery: dict[str, Any] = {
        "batchSize": at_once,
        "groupBy": ["transaction"] if grouped else [],
        "maxGroup": 100_000,
    }
    spec = {"partitions": 4, "delivery": delivery}
    view = Consumer(f"bench/pull-{secrets.token_hex(4)}", url=url, spec=spec)
    enough, started = asyncio.Event(), asyncio.Event()
    stop = asyncio.Event()

    async def handle(event: Event) -> None:
        started.set()
        if event.key == failing and failing is not None:
            raise ValueError("always")
        if view.dispatcher.counts.handled >= events:
            enough.set()

    view.on("*")(handle)
    serving = asyncio.create_task(view.serve(stop))
    await started.wait()
    watch = Stopwatch()
    await enough.wait()
    found = watch.stop(view.dispatcher.counts.handled)
    stop.set()
    await serving
    return found


def take_from_plain_queue(url: str, events: int, at_once: int) -> Measured:
    """Handle a number of events from a separate plain table."""
    with psycopg.connect(url) as connection:
        connection.execute("drop table if exists public.queue")
        connection.execute(_PLAIN, (events,))
        connection.execute("alter table public.queue add primary key (id)")
        connection.commit()
        watch, done = Stopwatch(), 0
        while taken := len(connection.cursor(binary=True).execute(_TAKE, (at_once,)).fetchall()):
            connection.commit()
            done += taken
        return watch.stop(done)


def commit_to_effect(url: str, rate: int, seconds: float) -> Latency:
    """Measure the time from the return of the commit to the handler, at a number of events per second."""
    return asyncio.run(_commit_to_effect(url, rate, seconds))


async def _commit_to_effect(url: str, rate: int, seconds: float) -> Latency:
    view = Consumer("bench/latency", url=url, spec={"partitions": 4, "start": {"from": "Latest"}})
    committed: dict[str, float] = {}
    handled: dict[str, float] = {}

    @view.on("*")
    async def handle(event: Event) -> None:
        handled[str(event.id)] = time.perf_counter()

    stop = asyncio.Event()
    serving = asyncio.create_task(view.serve(stop))
    await asyncio.sleep(2.0)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            event_id = await emit(connection, "x", {"n": number}, key=str(number % 100))
            await connection.commit()
            committed[str(event_id)] = time.perf_counter()
    while len(handled) < len(committed):  # noqa: ASYNC110 - a benchmark may look
        await asyncio.sleep(0.05)
    stop.set()
    await serving
    return Latency(tuple(sorted(max(0.0, handled[each] - committed[each]) for each in committed)))
