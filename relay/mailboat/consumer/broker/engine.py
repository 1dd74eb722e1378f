"""The engine for broker sources: runs handlers, one event of a key at a time, many keys at once.

Life of an event: received → ready → claimed → handling → marked done → settled. After a failure its lane is parked
until the next attempt is due. After the last attempt the dead letter is written, marked, and the event settled.

Tasks of an engine:

| task | does |
|---|---|
| workers (``concurrency``) | run handlers; a handler that does not wait costs no task switch |
| claimer | claims ready heads for all free workers in one call; without a claim store there is none |
| ``Marks`` | writes results to the claim store, many in one call |
| ``Burial`` | writes dead letters |
| ``Watchdog`` | names a handler that blocks the event loop |

An event whose consumers died gets its last attempt alone: no other handler runs and no other event is claimed
meanwhile. If the process dies again, that event is the cause, and not one that happened to be handled beside it.

The source calls ``take``, ``revoke`` and ``lose`` in the event loop. An event is settled at the source after its result
is stored, so whatever dies, the source delivers the event again and the claim store tells whether it is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from mailboat.consumer.broker.availability import Availability
from mailboat.consumer.broker.burial import Burial
from mailboat.consumer.broker.engine_state import EngineCounts, EngineSettings, EngineState, ParkedLane
from mailboat.consumer.broker.lanes import Lanes, Work
from mailboat.consumer.broker.marks import Mark, Marks
from mailboat.consumer.broker.protocol import (
    CONSUMER_DIED,
    Answer,
    BrokerPoint,
    Busy,
    Claim,
    Claimed,
    ClaimStore,
    ClaimsUnavailable,
    DeadLetter,
    DeadLetters,
    DeadLettersUnavailable,
    Execution,
    PassingPoint,
    Record,
    Source,
    ignore_point,
)
from mailboat.consumer.broker.watchdog import Watchdog
from mailboat.consumer.broker.workers import REVOKED, Workers
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.outcomes import GIVEN_BACK, Refusal

__all__ = ["BrokerEngine", "EngineCounts", "EngineSettings", "EngineState", "ParkedLane"]

log = logging.getLogger(__name__)

_FOREVER: Final = float("inf")
_SAME_EVENT: Final = 0.1
"""Seconds until a second copy of an event that this process handles right now is looked at again."""
_NEXT_SUSPECT: Final = 0.02
"""Seconds until another event whose consumers died is claimed."""
_INTERRUPTING: Final = 2.0
"""Seconds that a cancelled handler may take to end."""
_SHOWN: Final = 20
"""Parked lanes listed in the state."""
_CLAIMED: Final = BrokerPoint.CLAIMED  # bound once: looking up a member of an enum is slow
_HANDLED: Final = BrokerPoint.HANDLED
_MARKED_DONE: Final = BrokerPoint.MARKED_DONE


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
        self._random = random or Random()
        self.counts = EngineCounts()
        self._lanes = Lanes()
        self._claimed: deque[Work] = deque()
        """Claimed and not started; without a claim store unused."""
        self._claiming: set[Work] = set()
        self._held: set[Work] = set()
        """Taken from the lanes: claimed, handling, being marked or buried."""
        self._ids: set[str] = set()
        """Event ids that this process holds a claim of."""
        self._suspect: Work | None = None
        """Claimed event that is handled alone, because its consumers died."""
        self._burying: set[Work] = set()
        self._claims_away = Availability("Claim store", log, settings.consumer, self._random)
        self._dead_away = Availability("Dead-letter topic", log, settings.consumer, self._random)
        self._marks = (
            None
            if claims is None
            else Marks(claims, self._claims_away, self._marked, wait=not settings.handle_unclaimed)
        )
        self._burial = None if dead_letters is None else Burial(dead_letters, self._dead_away, self._buried)
        self._claim_wake = asyncio.Event()
        self._parked_timer: asyncio.TimerHandle | None = None
        self._let_go = asyncio.Event()
        self._dead_in_a_row = 0
        self._stopped: str | None = None
        self._ending = False
        self._workers = Workers(self, dispatcher, execution, count=settings.concurrency, timeout=settings.timeout)
        self._watchdog = Watchdog(settings.consumer, self._workers.current_handler)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set; then finish running handlers and commit."""
        self._loop = asyncio.get_running_loop()
        if self._claims is not None:
            await self._until_open(self._claims.open, ClaimsUnavailable, self._claims_away, stop)
        opening = [] if self._dead_letters is None else [asyncio.create_task(self._open_dead_letters(stop))]
        roles = [self._watchdog.run()]
        roles += [] if self._marks is None else [self._marks.run(), self._claim()]
        roles += [] if self._burial is None else [self._burial.run()]
        tasks = [*self._workers.start(), *(asyncio.create_task(role) for role in roles)]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.sleep(0)  # the watchdog starts before the first handler
        try:
            if not stop.is_set():
                await self._source.start(self)
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ending = True
            for ending in (stopping, *opening):
                ending.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await self._source.stop()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._workers.stop_timer()
            if self._parked_timer is not None:
                self._parked_timer.cancel()
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
        await self._until_open(self._dead_letters.open, DeadLettersUnavailable, self._dead_away, stop)

    async def _until_open(
        self, opening: Any, away: type[Exception], available: Availability, stop: asyncio.Event
    ) -> None:
        while not stop.is_set():
            try:
                await opening()
            except away as error:
                delay = available.failed(str(error))
                if self._settings.handle_unclaimed:
                    return
                try:
                    await asyncio.wait_for(stop.wait(), delay)
                except TimeoutError:
                    continue
            available.succeeded()
            return

    def state(self) -> EngineState:
        """Return the state from values in memory."""
        now = time.monotonic()  # the clock of the event loop
        lanes: list[ParkedLane] = []
        for work, behind in self._lanes.parked():
            if len(lanes) == _SHOWN:
                break
            event = work.record.event
            retry_in = None if work.due == _FOREVER else max(0.0, work.due - now)
            cause = work.cause or ""
            lanes.append(
                ParkedLane(
                    work.record.partition, event.key, str(event.id), event.type, work.attempt, cause, retry_in, behind
                )
            )
        return EngineState(
            source=self._source.state(),
            counts=self._dispatcher.counts,
            engine=self.counts,
            running=len(self._workers.running),
            ready=len(self._lanes.ready) + len(self._claimed),
            behind=self._lanes.behind_count,
            parked=self._lanes.parked_count,
            lanes=lanes,
            claims_trouble=self._claims_away.trouble,
            dead_letters_trouble=self._dead_away.trouble,
            stopped=self._stopped,
            blocked_by=self._watchdog.blocked,
        )

    # -- the source's side -------------------------------------------------------------------------------------------

    def take(self, records: Iterable[Record]) -> None:
        self.counts.received += self._lanes.add(records)
        self._passing(BrokerPoint.RECEIVED)
        self._wake()

    async def revoke(self, partitions: Iterable[int], within: float) -> None:
        gone = frozenset(partitions)
        self._forget(gone)
        if not await self._drained(gone, within):
            for work in [each for each in self._workers.running if each.record.partition in gone]:
                self._workers.interrupt(work, REVOKED)
            await self._drained(gone, _INTERRUPTING)
        for work in self._held:
            work.detached = work.detached or work.record.partition in gone
        self._withdraw_buried()

    def lose(self, partitions: Iterable[int]) -> None:
        gone = frozenset(partitions)
        self._forget(gone)
        for work in self._held:
            work.detached = work.detached or work.record.partition in gone
        self._withdraw_buried()

    def _forget(self, gone: Collection[int]) -> None:
        """Forget events that did not start, and release their claims."""
        for work in self._lanes.forget(gone):
            self._source.give_back(work.record)
        kept: deque[Work] = deque()
        for work in self._claimed:
            if work.record.partition in gone and work is not self._suspect:
                self._give_back(work)
            elif work.record.partition not in gone:
                kept.append(work)
        self._claimed = kept
        for work in self._claiming:
            if work.record.partition in gone:
                work.interrupted = REVOKED
        suspect = self._suspect
        if suspect is not None and suspect.record.partition in gone and suspect not in self._workers.running:
            self._give_back(suspect)

    def _withdraw_buried(self) -> None:
        """Stop trying to write dead letters of partitions that are gone: their next owner will."""
        if self._burial is not None:
            for work in self._burial.withdraw():
                self._mark(work, Mark.FAILED, 0.0)

    async def _drained(self, gone: Collection[int], within: float) -> bool:
        """Wait until no event of these partitions is held; return False after ``within`` seconds."""
        deadline = self._loop.time() + within
        while any(work.record.partition in gone and not work.detached for work in self._held):
            self._let_go.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._let_go.wait()
            except TimeoutError:
                return False
        return True

    # -- claims ------------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        """Claim ready heads, as many as workers are free, in one call."""
        assert self._claims is not None
        while True:
            free = self._settings.concurrency - len(self._workers.running) - len(self._claimed)
            held_back = self._stopped or self._ending or self._suspect is not None
            works = [] if held_back or free <= 0 else self._next_heads(free)
            if not works:
                self._claim_wake.clear()
                await self._claim_wake.wait()
                continue
            self._claiming.update(works)
            try:
                answers = await self._claims.claim([Claim(work.id, work.record.event.replay) for work in works])
                self._claims_away.succeeded()
            except ClaimsUnavailable as error:
                await self._no_claims(works, self._claims_away.failed(str(error)))
                continue
            finally:
                self._claiming.difference_update(works)
            for work, answer in zip(works, answers, strict=True):
                self._answered(work, answer)
            self._start_suspect()
            self._wake_worker()
            await asyncio.sleep(0)

    def _next_heads(self, limit: int) -> list[Work]:
        """Take ready heads that need a claim. Records for other consumers are settled, second copies parked."""
        works: list[Work] = []
        while len(works) < limit and self._lanes.ready:
            work = self._lanes.ready.popleft()
            if self._is_foreign(work):
                continue
            work.id = work.id or str(work.record.event.id)
            if work.id in self._ids:
                self._park(work, _SAME_EVENT, "SameEvent")
                continue
            self._ids.add(work.id)
            self._held.add(work)
            works.append(work)
        return works

    async def _no_claims(self, works: list[Work], delay: float) -> None:
        """The store is unavailable: let the lanes stand, or handle the events without it."""
        standing = []
        for work in works:
            if work.interrupted is not None:  # revoked meanwhile
                self._drop(work)
                self._source.give_back(work.record)
                self._lanes.finish(work)
            elif self._settings.handle_unclaimed:
                work.attempt += 1
                self.counts.unclaimed += 1
                self._claimed.append(work)
            else:
                self._drop(work)
                standing.append(work)
        if self._settings.handle_unclaimed:
            self._wake_worker()
            return
        self._lanes.put_back(standing)
        await asyncio.sleep(delay)

    def _answered(self, work: Work, answer: Answer) -> None:
        match answer:
            case Claimed(attempt, redeliveries):
                work.claimed = True
                work.attempt, work.redeliveries = attempt, redeliveries
                self.counts.takeovers += redeliveries > 0
                if work.interrupted is not None or self._stopped:
                    self._give_back(work)
                elif not redeliveries or attempt != self._settings.max_attempts:
                    self._claimed.append(work)
                elif self._suspect is None:
                    self._suspect = work
                else:
                    work.attempt -= 1
                    work.cause = CONSUMER_DIED
                    self._mark(work, Mark.FAILED, _NEXT_SUSPECT, counted=False)
            case Busy(seconds):
                self._drop(work)
                if work.interrupted is not None:
                    self._source.give_back(work.record)
                    self._lanes.finish(work)
                else:
                    self._park(work, seconds, "ClaimedByAnother" if work.cause is None else work.cause)
            case _:
                self.counts.duplicates += 1
                self._settle(work)

    def _start_suspect(self) -> None:
        """Handle the suspect as soon as nothing else is in hand."""
        suspect = self._suspect
        if suspect is None or suspect in self._workers.running or suspect in self._claimed:
            return
        if self._held == self._burying | {suspect}:
            log.warning("Event handled alone, since its consumers died", extra=self._fields(suspect))
            self._claimed.append(suspect)
            self._wake_worker()

    def _is_foreign(self, work: Work) -> bool:
        """Settle a replayed dead letter that is addressed to another consumer."""
        addressee = work.record.replay_for
        if addressee is None or addressee == self._settings.consumer:
            return False
        self.counts.skipped += 1
        self._settle(work)
        return True

    # -- workers -----------------------------------------------------------------------------------------------------

    def next_work(self) -> Work | None:
        """Return an event to handle; None if there is none, or if the engine starts no more."""
        if self._stopped or self._ending:
            return None
        if self._claims is not None:
            return self._claimed.popleft() if self._claimed else None
        while self._lanes.ready:
            work = self._lanes.ready.popleft()
            if work.record.replay_for is None or not self._is_foreign(work):
                self._held.add(work)
                work.attempt += 1
                return work
        return None

    def refusal_before(self, work: Work) -> Refusal | None:
        self._passing(_CLAIMED)
        if work.record.cannot_decode is not None:
            return Refusal("CannotDecode", work.record.cannot_decode, final=True)
        if work.attempt > self._settings.max_attempts:
            work.attempt -= 1
            return Refusal(CONSUMER_DIED, "the process died in every attempt", final=True)
        return None

    def finished(self, work: Work, refusal: Refusal | None, cause: BaseException | None, *, known: bool) -> None:
        self._passing(_HANDLED)
        if refusal is None:
            self._dead_in_a_row = 0
            self.counts.duplicates += known
            if work.claimed:
                self._mark(work, Mark.DONE)
            else:
                self._passing(_MARKED_DONE)
                self._settle(work)
            return
        if isinstance(cause, ClaimsUnavailable):
            self._claims_away.failed(str(cause))
        self._failed(work, refusal, cause)

    # -- results -----------------------------------------------------------------------------------------------------

    def _failed(self, work: Work, refusal: Refusal, cause: BaseException | None = None) -> None:
        """Retry later, or give the event up."""
        if work.interrupted == REVOKED and refusal is GIVEN_BACK:
            self._give_back(work)
            return
        if refusal.reason != GIVEN_BACK.reason:
            self._dispatcher.counts.refused += 1
            log.warning(
                "Event refused: %s",
                refusal.reason,
                extra=self._fields(work),
                exc_info=cause if refusal.reason == "HandlerFailed" else None,
            )
        work.first_failed = work.first_failed or datetime.now(UTC)
        work.cause = refusal.reason
        if refusal.final or (refusal.counted and work.attempt >= self._settings.max_attempts):
            self._give_up(work, refusal)
            return
        if refusal.retry_in is not None:
            retry_in = refusal.retry_in.total_seconds()
        else:
            retry_in = self._settings.backoff.delay(max(work.attempt, 1), self._random)
        if not refusal.counted:
            work.attempt -= 1
        self._mark(work, Mark.FAILED, retry_in, counted=refusal.counted)

    def _give_up(self, work: Work, refusal: Refusal) -> None:
        """Write the dead letter, unless the engine stops: a shutdown can make handlers fail."""
        if self._ending or self._stopped:
            self._give_back(work)
            return
        if self._burial is None:
            work.cause = f"{refusal.reason}: no attempts left"
            self._mark(work, Mark.FAILED, _FOREVER)
            return
        now = datetime.now(UTC)
        self._burying.add(work)
        self._burial.add(
            work,
            DeadLetter(
                record=work.record,
                refusal=refusal,
                attempts=work.attempt,
                first_failed=work.first_failed or now,
                failed_at=now,
                consumer=self._settings.consumer,
                group=self._settings.group,
            ),
        )
        self._dead_in_a_row += 1
        if self._settings.stop_at is not None and self._dead_in_a_row >= self._settings.stop_at:
            self._stopped = (
                f"{self._dead_in_a_row} events in a row became dead letters, the last one because of {refusal.reason}:"
                " fix the handler and restart the consumer"
            )
            log.error("Consumer stopped: %s", self._stopped, extra={"consumer": self._settings.consumer})

    def _buried(self, work: Work) -> None:
        self.counts.dead += 1
        self._passing(BrokerPoint.DEAD_LETTER_WRITTEN)
        self._mark(work, Mark.DEAD)

    def _give_back(self, work: Work) -> None:
        work.attempt = max(0, work.attempt - 1)
        self._mark(work, Mark.RELEASED)

    def _mark(self, work: Work, mark: Mark, retry_in: float = 0.0, *, counted: bool = True) -> None:
        """Store a result. Without a claim it takes effect at once."""
        if work.claimed and self._marks is not None:
            self._marks.add(work, mark, 0.0 if retry_in == _FOREVER else retry_in, counted=counted)
        else:
            self._marked(work, mark, True, retry_in)

    def _marked(self, work: Work, mark: Mark, ours: bool, retry_in: float) -> None:
        """The result is stored."""
        if not ours:
            self.counts.overlaps += 1
            log.warning("Claim was lost while the event was handled", extra=self._fields(work))
        match mark:
            case Mark.DONE:
                self._passing(BrokerPoint.MARKED_DONE)
                self._settle(work)
            case Mark.DEAD:
                self._passing(BrokerPoint.MARKED_DEAD)
                self._settle(work)
            case Mark.RELEASED:
                self._release(work)
            case Mark.FAILED:
                self._drop(work)
                if work.detached or work.interrupted == REVOKED:
                    self._lanes.finish(work)
                elif self._burial is None and work.cause is not None and work.cause.endswith("no attempts left"):
                    self._park(work, _FOREVER, work.cause)
                else:
                    self._park(work, retry_in, work.cause or "")

    def _release(self, work: Work) -> None:
        self._drop(work)
        if not work.detached:
            self._source.give_back(work.record)
        if (self._stopped or self._ending) and work.interrupted is None and not work.detached:
            self._park(work, _FOREVER, work.cause or "Stopped")
        else:
            self._lanes.finish(work)

    def _settle(self, work: Work) -> None:
        self._drop(work)
        if not work.detached:
            self._source.settle(work.record)
        self._lanes.finish(work)
        if self._lanes.ready:
            self._wake()

    def _drop(self, work: Work) -> None:
        """The engine no longer holds the event."""
        self._held.discard(work)
        self._burying.discard(work)
        if work is self._suspect:
            self._suspect = None
        elif self._suspect is not None:
            self._start_suspect()
        if work.id:
            self._ids.discard(work.id)
        self._let_go.set()
        if self._marks is not None:
            self._claim_wake.set()

    def _park(self, work: Work, seconds: float, cause: str) -> None:
        self._lanes.park(work, self._loop.time() + seconds, cause)
        due = self._lanes.next_due
        assert due is not None
        if due != _FOREVER and (self._parked_timer is None or due < self._parked_timer.when()):
            if self._parked_timer is not None:
                self._parked_timer.cancel()
            self._parked_timer = self._loop.call_at(due, self._release_due)

    def _release_due(self) -> None:
        self._parked_timer = None
        if self._lanes.release_due(self._loop.time()):
            self._wake()
        due = self._lanes.next_due
        if due is not None and due != _FOREVER:
            self._parked_timer = self._loop.call_at(due, self._release_due)

    # -- wake-ups and descriptions -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._marks is not None:
            self._claim_wake.set()
        else:
            self._wake_worker()

    def _wake_worker(self) -> None:
        if self._claimed if self._marks is not None else self._lanes.ready:
            self._workers.wake()

    def _fields(self, work: Work) -> dict[str, Any]:
        event = work.record.event
        return {
            "consumer": self._settings.consumer,
            "event": str(event.id),
            "type": event.type,
            "attempt": work.attempt,
            "partition": work.record.partition,
            "offset": work.record.original.offset,
        }
