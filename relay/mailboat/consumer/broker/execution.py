"""Execution of handlers without a transaction, and the threads of synchronous handlers."""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from queue import SimpleQueue
from typing import Any, NamedTuple

from mailboat.consumer.broker.interfaces import Dispatch
from mailboat.consumer.handlers import TransactionKind
from mailboat.consumer.received_event import Event
from mailboat.errors import ConfigError


class StillRunning(asyncio.CancelledError):
    """The coroutine was cancelled, and a thread still runs the handler."""


class PlainExecution:
    """Runs handlers without a transaction: asynchronous ones in the event loop, synchronous ones in threads."""

    def __init__(self, threads: int) -> None:
        self._threads = HandlerThreads(threads)

    def run(self, event: Event, dispatch: Dispatch) -> Coroutine[Any, Any, bool]:
        return dispatch(event, self)

    def transaction(self, kind: TransactionKind) -> Any:
        raise ConfigError(
            f"a handler wants a {kind.value}, and this consumer has no transaction: set idempotency.postgres, or use a"
            " pull subscription"
        )

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await self._threads.run(function)

    async def close(self) -> None:
        self._threads.close()


class _Job(NamedTuple):
    function: Callable[[], Any]
    context: contextvars.Context
    future: asyncio.Future[Any]


class HandlerThreads:
    """Daemon threads, started on demand. Results of several threads reach the event loop by one wake-up.

    A thread can't be interrupted: if the coroutine is cancelled, it still waits for the thread, and the result
    counts. So no other attempt of the event overlaps it. A second cancellation raises ``StillRunning``.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._signalled = False
        self._busy = 0
        self._threads = 0

    async def run(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._busy += 1
        if self._busy > self._threads and self._threads < self._size:
            self._threads += 1
            threading.Thread(target=self._work, args=(loop,), name="mailboat-handler", daemon=True).start()
        self._jobs.put(_Job(function, contextvars.copy_context(), future))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.done():
                raise
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            raise StillRunning from None

    def close(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result, error = job.context.run(job.function), None
            except BaseException as raised:
                result, error = None, raised
            self._results.append((job.future, result, error))
            del job
            if not self._signalled:
                self._signalled = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed: the result is not awaited any more
                    return

    def _deliver(self) -> None:
        self._signalled = False  # before the results are read: a thread that adds one later signals again
        while self._results:
            future, result, error = self._results.popleft()
            self._busy -= 1
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # marks it as retrieved: the coroutine may have been cancelled


class Isolated:
    """A coroutine in a context of its own, as a task of its own would have, without the cost of a task.

    ``start`` runs it until it waits or ends. Where it waits, ``await`` runs the rest.
    """

    __slots__ = ("_coroutine", "_run", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, bool]) -> None:
        self._coroutine = coroutine
        self._run = contextvars.copy_context().run

    def start(self) -> bool | None:
        """Return the result; None if the coroutine waits."""
        try:
            self._waits_for = self._run(self._coroutine.send, None)
        except StopIteration as end:
            result: bool = end.value
            return result
        return None

    def __await__(self) -> Generator[Any, Any, bool]:
        run, coroutine, waits_for = self._run, self._coroutine, self._waits_for
        try:
            while True:
                try:
                    yield waits_for
                except BaseException as error:
                    waits_for = run(coroutine.throw, error)
                else:
                    waits_for = run(coroutine.send, None)
        except StopIteration as end:
            result: bool = end.value
            return result
