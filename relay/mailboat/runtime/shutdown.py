"""Stop of a process: signals while it starts, and waits that a stop ends.

Life of a process: *Starting* (nothing is in flight, a signal exits with 0 at once) → *Running* (the first signal sets
an event, a second one exits at once: ``mailboat_spec.stop_signals``).

Kubernetes sends SIGTERM at any time, also while modules are imported. The kernel discards signals without a handler for
the first process of a container, so a process without one would be killed after the whole grace period. So the handlers
are installed before everything else, and this module imports nothing that is slow to import.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """Stop was requested before a session existed that could be ended in an orderly way."""


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with 0 at a signal. ``stop_on_signals`` replaces the handlers. Main thread only."""
    before = {number: signal.signal(number, _exit) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


async def first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Wait until one of the events is set, or for ``timeout`` seconds."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def unless_stopped(
    stop: asyncio.Event, work: Coroutine[Any, Any, T], in_the_middle: Callable[[], bool] = bool
) -> T:
    """Return the result of ``work``. On a stop, cancel it unless ``in_the_middle``, and raise ``StopRequested``."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not in_the_middle():
            task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            raise StopRequested
        return task.result()
    finally:
        stopping.cancel()
        if not task.done():  # the caller was cancelled: leave no task behind
            task.cancel()
            await asyncio.wait({task})


def _exit(number: int, frame: object) -> NoReturn:
    """Exit without an exception, which a destructor or a callback of the interpreter could swallow."""
    os._exit(0)
