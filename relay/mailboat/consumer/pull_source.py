"""The engine for pull subscriptions: workers that pull, run handlers and commit, one transaction after the other.

A worker counts no attempt if the event is not the cause: after a lost connection, a deadlock or a shutdown the events
are returned to the subscription. If the database is unavailable, workers reconnect with back-off.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final
from uuid import UUID

from mailboat.consumer.dispatch import Dispatcher, NotHandled
from mailboat.consumer.handler_outcomes import GIVEN_BACK, refusal_for
from mailboat.consumer.points import ConsumerPoint as ConsumerPoint
from mailboat.consumer.points import Passing as Passing
from mailboat.consumer.points import ignore_point
from mailboat.consumer.received_event import Event
from mailboat.consumer.transactions import WorkerSession, error_message, is_transient, sqlstate
from mailboat.delivery.backoff import Backoff
from mailboat.errors import ConfigError

log = logging.getLogger(__name__)

RECONNECT: Final = Backoff(initial=0.2, factor=2, ceiling=10.0, jitter=0.2)


_NOT_NOW: Final = frozenset({"57014", "55P03"})
"""SQLSTATEs of a statement or lock timeout: the pull is retried."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between polls that return no events."""

    first: float = 0.25
    longest: float = 2.0
    """Maximum without notifications. With notifications, polls only cover lost ones (``longest_notified``)."""
    longest_notified: float = 30.0
    drain_within: float = 20.0
    """How long a shutdown waits for handlers before their transactions are rolled back."""


@dataclass(slots=True)
class WakeUp:
    """Wakes idle workers. ``notified``: True while notifications of writers arrive."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    notified: bool = False

    def set(self) -> None:
        self.event.set()


class PullSource:
    """All workers of one consumer process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        open_session: Callable[[], Awaitable[WorkerSession]],
        *,
        workers: int,
        pace: Pace | None = None,
        wake: WakeUp | None = None,
        passing: Passing = ignore_point,
        random: Random | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._open_session = open_session
        self._workers = workers
        self._pace = pace or Pace()
        self._wake = wake or WakeUp()
        self._passing = passing
        self._random = random or Random()
        self.connected = 0
        self.error: str | None = None
        """Why the last connection was lost; None after a reconnect."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run workers until ``stop`` is set. Then finish batches in flight, or return them after ``drain_within``."""
        tasks = {asyncio.create_task(self._work(stop), name=f"worker {number}") for number in range(self._workers)}
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]
            stop.set()
            self._wake.set()
            _, running = await asyncio.wait(tasks, timeout=self._pace.drain_within)
            for task in running:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in (task.exception() for task in ended if not task.cancelled()):
                if result is not None:
                    raise result
            for outcome in results:
                if isinstance(outcome, Exception):
                    raise outcome
        finally:
            stopping.cancel()

    async def _work(self, stop: asyncio.Event) -> None:
        failures, empty = 0, 0
        unfinished: list[UUID] = []
        session: WorkerSession | None = None
        try:
            while not stop.is_set():
                try:
                    if session is None:
                        session = await self._open_session()
                        self.connected += 1
                        self.error = None
                    while unfinished:
                        await session.refuse(unfinished[-1], GIVEN_BACK)
                        unfinished.pop()
                    busy = await self._turn(session, unfinished)
                    failures = 0
                except ConfigError:
                    raise
                except Exception as error:  # drivers have different exception classes
                    if session is not None and not session.is_lost():
                        raise
                    failures += 1
                    self._note_loss(error)
                    if session is not None:
                        self.connected -= 1
                        await _quietly(session.close())
                        session = None
                    await self._idle(stop, RECONNECT.delay(failures, self._random))
                    continue
                empty = 0 if busy else empty + 1
                if not busy:
                    longest = self._pace.longest_notified if self._wake.notified else self._pace.longest
                    if await self._idle(stop, min(self._pace.first * 2 ** min(empty - 1, 20), longest)):
                        empty = 0
        finally:
            if session is not None:
                self.connected -= 1
                await _quietly(session.close())

    async def _turn(self, session: WorkerSession, unfinished: list[UUID]) -> bool:
        """Run one transaction and return False if it had no events. ``unfinished``: events that a lost connection left
        undecided."""
        try:
            batch = await session.pull()
        except Exception as error:
            if session.is_lost():
                raise
            await session.rollback()
            if is_transient(error) or sqlstate(error) in _NOT_NOW:
                return False
            raise ConfigError(f"consumer {self._dispatcher.name} can't pull: {error_message(error)}") from error
        if not batch:
            await session.commit()
            return False
        unfinished[:] = [batch[0].id]
        self._passing(ConsumerPoint.PULLED)
        try:
            await self._dispatcher.handle(batch, session)
            self._passing(ConsumerPoint.HANDLED)
            await session.commit()
            self._passing(ConsumerPoint.COMMITTED)
        except asyncio.CancelledError:
            await session.rollback()
            await session.refuse(batch[0].id, GIVEN_BACK)
            raise
        except NotHandled as failure:
            await self._refuse(session, batch, failure)
        except Exception as error:  # the commit failed: a deferred constraint, a serialization failure
            await self._refuse(session, batch, NotHandled(None, refusal_for(error)), error)
        unfinished.clear()
        return True

    async def _refuse(
        self, session: WorkerSession, batch: list[Event], failure: NotHandled, error: Exception | None = None
    ) -> None:
        """Roll back the batch and refuse the failed event.

        If the failed event is unknown, only roll back: the database then returns the events one at a time.
        """
        await session.rollback()
        self._passing(ConsumerPoint.ROLLED_BACK)
        event = failure.event or (batch[0] if len(batch) == 1 else None)
        cause = error or failure.__cause__
        refusal = GIVEN_BACK if cause is not None and is_transient(cause) else failure.refusal
        if refusal is GIVEN_BACK:
            event = event or batch[0]
        outcome = "Unblamed" if event is None else await session.refuse(event.id, refusal)
        if refusal is not GIVEN_BACK:
            self._dispatcher.counts.refused += 1
            log.warning(
                "Event refused: %s",
                refusal.reason,
                extra={
                    "consumer": self._dispatcher.name,
                    "event": str(event.id) if event else None,
                    "type": event.type if event else None,
                    "attempt": event.attempt if event else None,
                    "outcome": outcome,
                },
                exc_info=cause if refusal.reason == "HandlerFailed" else None,
            )
        self._passing(ConsumerPoint.REFUSED)

    async def _idle(self, stop: asyncio.Event, seconds: float) -> bool:
        """Wait up to ``seconds`` and return True if the worker was woken earlier."""
        self._wake.event.clear()
        if stop.is_set():
            return False
        try:
            async with asyncio.timeout(seconds * self._random.uniform(0.8, 1.0)):
                await self._wake.event.wait()
        except TimeoutError:
            return False
        return True

    def _note_loss(self, error: Exception) -> None:
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self.error is None:
            log.warning("Database unavailable: %s", message, extra={"consumer": self._dispatcher.name})
        self.error = message


async def _quietly(closing: Awaitable[None]) -> None:
    try:
        await closing
    except Exception as error:
        log.debug("A connection ended badly: %s", error)
