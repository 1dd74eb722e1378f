"""Threads for blocking calls: one per call, never from asyncio's default pool.

That pool has a handful of threads, and the DNS lookup of the database's address needs one of them: twenty unavailable
destinations, each with a call of ten seconds, would occupy all. A sink has at most one such call in flight. The threads
are daemons, so that a call that hangs in a vendor's client does not prevent the relay from exiting.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def in_a_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``work`` in a thread and return its future. If the future is cancelled, ``work`` runs on and its result is
    dropped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_state: Callable[[Any], None], value: object) -> None:
        if not done.done():
            set_state(value)
            done.exception()  # marks an error as retrieved: asyncio would log it if no task awaits it any more

    def run() -> None:
        try:
            end = partial(finish, done.set_result, work())
        except BaseException as error:
            end = partial(finish, done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the result is not awaited any more
            loop.call_soon_threadsafe(end)

    threading.Thread(target=run, name=f"mailboat-{name}", daemon=True).start()
    return done
