"""The engine for broker sources: runs handlers, one event of a key at a time, many keys at once.

Life of an event: received → ready → claimed → handling → marked done → settled. After a failure its lane is parked
until the next attempt is due. After the last attempt the dead letter is written, marked, and the event settled.

| module | does |
|---|---|
| ``engine`` | starts and ends the tasks; what the source calls (``take``, ``revoke``, ``lose``); the state |
| ``lanes``, ``in_flight`` | where each event is |
| ``claimer`` | claims ready heads for all free workers in one call; without a claim store there is none |
| ``workers`` | run handlers (``concurrency``); a handler that does not wait costs no task switch |
| ``lifecycle`` | what follows from a result |
| ``marks`` | writes results to the claim store, many in one call |
| ``dead_letter_queue`` | writes dead letters |
| ``watchdog`` | names a handler that blocks the event loop |

The source calls ``take``, ``revoke`` and ``lose`` in the event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import islice
from random import Random
from typing import Final

from mailboat.consumer.broker.availability import Availability
from mailboat.consumer.broker.claimer import Claimer
from mailboat.consumer.broker.engine_state import EngineSettings, EngineState, ParkedLane
from mailboat.consumer.broker.in_flight import InFlight
from mailboat.consumer.broker.interfaces import (
    BrokerPoint,
    ClaimStore,
    ClaimsUnavailable,
    DeadLetters,
    DeadLettersUnavailable,
    Execution,
    PassingPoint,
    Record,
    Source,
    ignore_point,
)
from mailboat.consumer.broker.lifecycle import EventLifecycle
from mailboat.consumer.broker.watchdog import Watchdog
from mailboat.consumer.broker.work import FOREVER, REVOKED, Work
from mailboat.consumer.broker.workers import IdleWorkers, Workers
from mailboat.consumer.dispatch import Dispatcher

__all__ = ["BrokerEngine", "EngineSettings", "EngineState"]

_INTERRUPTING: Final = 2.0
"""Seconds that a cancelled handler may take to end."""
_SHOWN: Final = 20
"""Parked lanes listed in the state."""


class BrokerEngine:
    """Runs the handlers of one consumer process. Implements ``Receiver``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        source: Source,
        claims: ClaimStore | None,
        execution: Execution,
        dead_letters: DeadLetters | None,
        settings: EngineSettings,
        *,
        passing: PassingPoint = ignore_point,
        random: Random | None = None,
    ) -> None:
        """Without ``claims``, attempts are counted in memory. Without ``dead_letters``, an event without attempts left
        blocks its key."""
        self._dispatcher = dispatcher
        self._source = source
        self._claims = claims
        self._execution = execution
        self._dead_letters = dead_letters
        self._settings = settings
        self._passing = passing
        idle = IdleWorkers()
        self._in_flight = InFlight(idle, with_claims=claims is not None)
        self._lifecycle = EventLifecycle(
            self._in_flight,
            source,
            claims,
            dead_letters,
            settings,
            dispatcher.counts,
            passing=passing,
            random=random or Random(),
        )
        self.counts = self._lifecycle.counts
        self._workers = Workers(
            idle, self._lifecycle, dispatcher, execution, count=settings.concurrency, timeout=settings.timeout
        )
        self._claimer = (
            None
            if claims is None
            else Claimer(claims, self._in_flight, self._lifecycle, self._workers, source, settings)
        )
        self._watchdog = Watchdog(settings.consumer, self._workers)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set; then finish running handlers and commit."""
        if self._claims is not None:
            await self._until_open(self._claims.open, ClaimsUnavailable, self._lifecycle.claims_availability, stop)
        opening = [] if self._dead_letters is None else [asyncio.create_task(self._open_dead_letters(stop))]
        roles = [self._watchdog.run(), *self._lifecycle.tasks()]
        roles += [] if self._claimer is None else [self._claimer.run()]
        tasks = [*self._workers.start(), *(asyncio.create_task(role) for role in roles)]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.sleep(0)  # the watchdog starts before the first handler
        try:
            if not stop.is_set():
                await self._source.start(self)
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._in_flight.ending = True
            for ending in (stopping, *opening):
                ending.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await self._source.stop()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._workers.stop_timer()
            self._in_flight.stop_timer()
            await self._execution.close()
            if self._dead_letters is not None:
                await self._dead_letters.close()
            if self._claims is not None:
                await self._claims.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _open_dead_letters(self, stop: asyncio.Event) -> None:
        """Open them beside the handling of events: their topic may be missing, and is needed by dead letters only."""
        assert self._dead_letters is not None, "the caller has looked"
        availability = self._lifecycle.dead_letters_availability
        await self._until_open(self._dead_letters.open, DeadLettersUnavailable, availability, stop)

    async def _until_open(
        self,
        connect: Callable[[], Awaitable[None]],
        unavailable: type[Exception],
        availability: Availability,
        stop: asyncio.Event,
    ) -> None:
        while not stop.is_set():
            try:
                await connect()
            except unavailable as error:
                delay = availability.failed(str(error))
                if self._settings.handle_unclaimed:
                    return
                try:
                    await asyncio.wait_for(stop.wait(), delay)
                except TimeoutError:
                    continue
            availability.succeeded()
            return

    # -- the source's side -------------------------------------------------------------------------------------------

    def take(self, records: Iterable[Record]) -> None:
        self.counts.received += self._in_flight.lanes.add(records)
        self._passing(BrokerPoint.RECEIVED)
        self._in_flight.wake()

    async def revoke(self, partitions: Iterable[int], within: float) -> None:
        revoked = frozenset(partitions)
        self._forget(revoked)
        if not await self._in_flight.drained(revoked, within):
            for work in [each for each in self._workers.running if each.record.partition in revoked]:
                self._workers.interrupt(work, REVOKED)
            await self._in_flight.drained(revoked, _INTERRUPTING)
        self._in_flight.detach(revoked)
        self._lifecycle.withdraw_dead_letters()

    def lose(self, partitions: Iterable[int]) -> None:
        lost = frozenset(partitions)
        self._forget(lost)
        self._in_flight.detach(lost)
        self._lifecycle.withdraw_dead_letters()

    def _forget(self, partitions: Collection[int]) -> None:
        """Forget events that did not start, and release their claims."""
        in_flight = self._in_flight
        for work in in_flight.lanes.forget(partitions):
            self._source.release(work.record)
        for work in in_flight.claiming:
            if work.record.partition in partitions:
                work.interrupted = REVOKED
        unstarted = [work for work in in_flight.claimed if work.record.partition in partitions]
        in_flight.claimed = deque(work for work in in_flight.claimed if work.record.partition not in partitions)
        suspect = in_flight.suspect
        if suspect is not None and not in_flight.suspect_started and suspect.record.partition in partitions:
            unstarted.append(suspect)
        for work in unstarted:
            self._lifecycle.release(work)

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> EngineState:
        """Return the state from values in memory."""
        in_flight, lanes = self._in_flight, self._in_flight.lanes
        return EngineState(
            source=self._source.state(),
            counts=self._dispatcher.counts,
            engine=self.counts,
            running=len(self._workers.running),
            ready=len(lanes.ready) + len(in_flight.claimed),
            behind=lanes.behind_count,
            parked=lanes.parked_count,
            lanes=[_parked(work, behind) for work, behind in islice(lanes.parked(), _SHOWN)],
            claims_error=self._lifecycle.claims_availability.error,
            dead_letters_error=self._lifecycle.dead_letters_availability.error,
            stopped=in_flight.stopped,
            blocked_by=self._watchdog.blocked,
        )


def _parked(work: Work, behind: int) -> ParkedLane:
    event = work.record.event
    return ParkedLane(
        work.record.partition,
        event.key,
        str(event.id),
        event.type,
        work.attempt,
        work.cause or "",
        None if work.due == FOREVER else max(0.0, work.due - time.monotonic()),  # the clock of the event loop
        behind,
    )
