"""Threads for calls that block: one per call, and never those of asyncio's own pool.

That pool has a handful of threads for the whole process, and among those who wait for one is whoever looks up the
database's address. Twenty destinations that are away, each asked for ten seconds at a time, would stop them all.

A sink has one such call on its way at most, so there are never more threads than sinks. They are daemons: nothing that
hangs in a vendor's client keeps a relay from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_a_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """What ``work`` returns or raises. It goes on if the future is cancelled; nobody hears of its end then."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(_heard)

    def run() -> None:
        try:
            end = partial(_succeed, done, work())
        except BaseException as error:
            end = partial(_fail, done, error)
        try:
            loop.call_soon_threadsafe(end)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=run, name=f"mailboat-{name}", daemon=True).start()
    return done


def _succeed(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[T], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)


def _heard(done: asyncio.Future[T]) -> None:
    """An error that nobody waits for any more is not worth a line in the log."""
    if not done.cancelled():
        done.exception()
