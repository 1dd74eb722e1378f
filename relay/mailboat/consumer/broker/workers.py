"""Workers: tasks that run handlers, one event after the other.

A handler that does not wait costs no task and no task switch: one worker runs all of them, and lets other tasks run
every few milliseconds. The next worker is woken only when there is more work, and gets its turn as soon as a handler
waits.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from mailboat.consumer.broker.execution import Isolated, StillRunning
from mailboat.consumer.broker.interfaces import TIMED_OUT, ClaimsUnavailable, Execution
from mailboat.consumer.broker.work import FOREVER, REVOKED, Lifecycle, Work
from mailboat.consumer.dispatch import Dispatcher, NotHandled
from mailboat.consumer.handler_outcomes import GIVEN_BACK, Refusal, refusal_for
from mailboat.consumer.received_event import Event

log = logging.getLogger(__name__)

_SLICE: Final = 0.005
"""Seconds that a worker runs handlers that do not wait before it lets other tasks run."""


@dataclass(slots=True, eq=False)
class _Worker:
    task: asyncio.Task[None] | None = None
    work: Work | None = None
    deadline: float = FOREVER
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class IdleWorkers:
    """Workers that wait for an event. A worker that starts wakes the next one, which waits again if there is none."""

    def __init__(self) -> None:
        self._idle: deque[asyncio.Event] = deque()
        self._waking = False

    def wake(self) -> None:
        """Wake one worker, unless one is on its way."""
        if self._idle and not self._waking:
            self._waking = True
            self._idle.popleft().set()

    async def wait(self, woken: asyncio.Event) -> None:
        woken.clear()
        self._idle.append(woken)
        await woken.wait()
        self._waking = False


class Workers:
    """All workers of one engine."""

    def __init__(
        self,
        idle: IdleWorkers,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        execution: Execution,
        *,
        count: int,
        timeout: float | None,
    ) -> None:
        self._idle = idle
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._execution = execution
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._workers = [_Worker() for _ in range(count)]
        self.running: dict[Work, _Worker] = {}
        """Handlers that run and wait for something."""
        self.waits = 0
        """How many handlers have waited for something since the start."""

    def start(self) -> list[asyncio.Task[None]]:
        """Return the tasks. The caller cancels them."""
        self._loop = asyncio.get_running_loop()
        tasks = []
        for number, worker in enumerate(self._workers):
            worker.task = asyncio.create_task(self._work(worker), name=f"worker {number}")
            tasks.append(worker.task)
        return tasks

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self, work: Work, reason: str) -> None:
        """Cancel the handler of an event that is running."""
        worker = self.running[work]
        if work.interrupted is None and worker.task is not None:
            work.interrupted = reason
            worker.task.cancel()

    async def _work(self, worker: _Worker) -> None:
        clock, lifecycle = self._loop.time, self._lifecycle
        run, dispatch = self._execution.run, self._dispatcher.handle_one
        slice_end = clock() + _SLICE
        while True:
            work = lifecycle.next_work()
            if work is None:
                await self._idle.wait(worker.woken)
                slice_end = clock() + _SLICE
                continue
            refusal = lifecycle.refusal_before(work)
            cause: BaseException | None = None
            handled: bool | None = False
            if refusal is None:
                event = work.record.event
                if work.attempt != 1 or work.redeliveries:
                    event = replace(event, attempt=work.attempt, redeliveries=work.redeliveries)
                worker.work = work
                handlers = Isolated(run(event, dispatch))
                try:
                    handled = handlers.start()
                    if handled is None:
                        handled = await self._wait_for(handlers, work, worker)
                except BaseException as error:
                    refusal, cause = self._refusal_for(error, work)
                finally:
                    worker.work = None
                if work.interrupted is not None and worker.task is not None:
                    worker.task.uncancel()
                    if work.interrupted == TIMED_OUT:
                        work.interrupted = None
            lifecycle.finished(work, refusal, cause, duplicate=not handled)
            if clock() > slice_end:
                await asyncio.sleep(0)
                slice_end = clock() + _SLICE

    async def _wait_for(self, handlers: Isolated, work: Work, worker: _Worker) -> bool:
        """Run the rest of handlers that wait for something. Another worker continues meanwhile."""
        self.running[work] = worker
        self.waits += 1
        if self._timeout is not None:
            worker.deadline = self._loop.time() + self._timeout
            if self._timer is None:
                self._timer = self._loop.call_at(worker.deadline, self._interrupt_expired)
        self._idle.wake()
        try:
            return await handlers
        finally:
            del self.running[work]

    def _refusal_for(self, error: BaseException, work: Work) -> tuple[Refusal, BaseException | None]:
        """Return the consequence of an error for the event, and its cause. Raises it again if the worker ends."""
        match error:
            case NotHandled():
                return error.refusal, error.__cause__
            case ClaimsUnavailable():
                return GIVEN_BACK, error
            case StillRunning():
                raise error  # the process ends; the claim expires with its lease
            case asyncio.CancelledError():
                if work.interrupted is None:
                    raise error
                return (GIVEN_BACK if work.interrupted == REVOKED else self._timed_out()), None
            case Exception():
                return refusal_for(error), error
            case _:
                raise error

    def _timed_out(self) -> Refusal:
        return Refusal(TIMED_OUT, f"the handler took longer than {self._timeout:g} s")

    def _interrupt_expired(self) -> None:
        """Cancel handlers past their deadline."""
        self._timer = None
        now = self._loop.time()
        expired = [(work, worker) for work, worker in self.running.items() if worker.deadline <= now]
        for work, _ in expired:
            if work.interrupted is None:
                log.warning(
                    "Handler timed out",
                    extra={
                        "consumer": self._dispatcher.name,
                        "handler": self._names(work.record.event),
                        "event": str(work.record.event.id),
                    },
                )
                self.interrupt(work, TIMED_OUT)
        pending = [worker.deadline for work, worker in self.running.items() if work.interrupted is None]
        if pending:
            self._timer = self._loop.call_at(min(pending), self._interrupt_expired)

    def current_handler(self) -> str:
        """Return the handler that runs in the event loop now. May be called from another thread."""
        task = asyncio.current_task(self._loop)
        for worker in self._workers:
            if worker.task is task and (work := worker.work) is not None:
                return f"{self._names(work.record.event)} (event {work.record.event.id})"
        return "the application" if task is None else f"task {task.get_name()}"

    def _names(self, event: Event) -> str:
        return ", ".join(each.name for each in self._dispatcher.handlers_for(event.type)) or "no handler"
