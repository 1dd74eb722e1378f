"""The work queue: a key is processed once at a time, the longest due key first, with a growing delay after failures."""

from __future__ import annotations

import asyncio

import pytest

from mailboat_operator.controller.workqueue import Backoff, WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(clock):
    return WorkQueue(Backoff(initial=1, factor=2, longest=8, jitter=0), clock)


async def ready(queue):
    """Return the key that is due now, or None."""
    try:
        async with asyncio.timeout(0):
            return await queue.next()
    except TimeoutError:
        return None


async def test_a_key_that_is_added_twice_comes_once(queue):
    queue.add("a")
    queue.add("a")
    assert (await queue.next(), await ready(queue)) == ("a", None)


async def test_a_key_that_is_added_while_it_is_worked_on_comes_again_afterwards(queue):
    queue.add("a")
    assert await queue.next() == "a"
    queue.add("a")
    assert await ready(queue) is None
    queue.succeeded("a")
    assert await queue.next() == "a"


async def test_the_key_that_has_been_due_for_longest_comes_first(queue, clock):
    queue.add("late", delay=2)
    queue.add("soon", delay=1)
    assert await ready(queue) is None
    clock.now = 3
    assert [await queue.next(), await queue.next()] == ["soon", "late"]


async def test_an_earlier_time_wins_over_a_later_one(queue, clock):
    queue.add("a", delay=5)
    queue.add("a")
    queue.add("a", delay=9)
    assert await queue.next() == "a"


async def test_failures_wait_longer_each_time_and_success_forgets_them(queue, clock):
    delays = []
    for _ in range(5):
        queue.add("a")
        assert await ready(queue) in ("a", None)
        delays.append(queue.failed("a"))
        clock.now += delays[-1]
    assert delays == [1, 2, 4, 8, 8]
    assert await queue.next() == "a"
    queue.succeeded("a")
    queue.add("a")
    await queue.next()
    assert queue.failed("a") == 1


async def test_an_add_during_the_back_off_does_not_shorten_it(queue, clock):
    queue.add("a")
    await queue.next()
    queue.add("a")
    queue.failed("a", retry_after=5)
    assert await ready(queue) is None
    clock.now = 5
    assert await queue.next() == "a"


async def test_a_new_key_wakes_a_waiting_worker(queue):
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    queue.add("a")
    assert await waiting == "a"


async def test_only_due_objects_without_a_running_worker_wait(queue, clock):
    queue.add("later", 5)
    assert queue.waiting() == 0
    queue.add("now")
    queue.add("too")
    assert queue.waiting() == 2
    first = await queue.next()
    assert queue.waiting() == 1
    queue.succeeded(first, 5)
    queue.succeeded(await queue.next(), 5)
    assert (queue.waiting(), len(queue._due)) == (0, 3)
    clock.now = 5
    assert queue.waiting() == 3
