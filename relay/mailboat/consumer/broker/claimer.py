"""Claims of events that are about to start: all ready heads for which a worker is free, in one call.

Claims are made just in time, since an event that is claimed and not started makes every successor wait for the lease.
Handlers that do not wait end within microseconds. If workers run out of claimed events, more events are claimed than
there are workers: one half of them is handled while the claim store processes the call for the other half.

If the store does not answer a claim, the claim may exist all the same. Its event is claimed again after the outage. If
its partition was revoked meanwhile, the claim is released then: otherwise the next owner would wait for the end of the
lease and count an attempt.

An event whose consumers died gets its last attempt alone (the *suspect*): no other handler runs and no other event is
claimed meanwhile. If the process dies again, that event is the cause, and not one that was handled beside it.
"""

import asyncio
import logging
import time
from typing import Final

from mailboat.consumer.broker.engine_state import EngineSettings
from mailboat.consumer.broker.in_flight import InFlight
from mailboat.consumer.broker.interfaces import (
    CONSUMER_DIED,
    Claim,
    Claimed,
    ClaimReply,
    ClaimStore,
    ClaimsUnavailable,
    Finished,
    Source,
)
from mailboat.consumer.broker.lifecycle import EventLifecycle
from mailboat.consumer.broker.work import FAILED, Work
from mailboat.consumer.broker.workers import Workers

log = logging.getLogger(__name__)

_SAME_EVENT: Final = 0.1
"""Seconds until a second copy of an event that this process handles right now is looked at again."""
_SOON: Final = 0.01
"""Seconds within which claimed events are to start."""
_MOST_AT_ONCE: Final = 512
"""Claimed events, if there are not more workers. All of them wait for the lease if the process dies."""
_NEXT_SUSPECT: Final = 0.02
"""Seconds until another event whose consumers died is claimed."""


class Claimer:
    """Claims events and hands them to the workers. ``run`` is one task of the engine."""

    def __init__(
        self,
        claims: ClaimStore,
        in_flight: InFlight,
        lifecycle: EventLifecycle,
        workers: Workers,
        source: Source,
        settings: EngineSettings,
    ) -> None:
        self._claims = claims
        self._in_flight = in_flight
        self._lifecycle = lifecycle
        self._workers = workers
        self._source = source
        self._settings = settings
        self._claim_limit = settings.concurrency
        """Events that may be claimed or handled at the same time."""
        self._replied_at = 0.0
        self._starved = False
        """Workers had no claimed event left at the last answer."""
        self._waits = 0
        """``Workers.waits`` at the last call."""
        self._unconfirmed: set[str] = set()
        """Ids of events that the store may have claimed without an answer."""

    async def run(self) -> None:
        in_flight, availability = self._in_flight, self._lifecycle.claims_availability
        while True:
            self._start_suspect()
            works = self._next_heads()
            if not works and self._unconfirmed:
                await self._release_unconfirmed()
                continue
            if not works:
                in_flight.claim_wake.clear()
                await in_flight.claim_wake.wait()
                continue
            in_flight.claiming.update(works)
            try:
                replies = await self._claims.claim([Claim(work.id, work.record.event.replay) for work in works])
                availability.succeeded()
            except ClaimsUnavailable as error:
                self._unconfirmed.update(work.id for work in works)
                await self._without_claims(works, availability.failed(str(error)))
                continue
            finally:
                in_flight.claiming.difference_update(works)
            self._replied_at, self._starved = time.monotonic(), not in_flight.claimed
            self._unconfirmed.difference_update(work.id for work in works)
            for work, reply in zip(works, replies, strict=True):
                self._on_reply(work, reply)
            in_flight.wake_worker()

    async def _release_unconfirmed(self) -> None:
        """Release claims without an answer, except of events that this process holds."""
        availability = self._lifecycle.claims_availability
        try:
            await self._claims.release([each for each in self._unconfirmed if each not in self._in_flight.ids])
        except ClaimsUnavailable as error:
            await asyncio.sleep(availability.failed(str(error)))
        else:
            availability.succeeded()
            self._unconfirmed.clear()

    def _next_heads(self) -> list[Work]:
        """Take ready heads, as many as workers are free. Records for other consumers are settled, second copies
        parked."""
        in_flight = self._in_flight
        if in_flight.stopped or in_flight.ending or in_flight.suspect is not None:
            return []
        if len(in_flight.claimed) > in_flight.claim_below:
            return []
        claim_limit, workers = self._limit(), self._settings.concurrency
        limit = min(claim_limit - len(self._workers.running) - len(in_flight.claimed), max(claim_limit // 2, workers))
        works: list[Work] = []
        while len(works) < limit and in_flight.lanes.ready:
            work = in_flight.lanes.ready.popleft()
            if self._lifecycle.is_foreign(work):
                continue
            work.id = work.id or str(work.record.event.id)
            if work.id in in_flight.ids:
                in_flight.park(work, _SAME_EVENT, "SameEvent")
                continue
            in_flight.ids.add(work.id)
            in_flight.held.add(work)
            works.append(work)
        return works

    def _limit(self) -> int:
        """Return how many events may be claimed or handled at the same time: as many as there are workers; more if
        handlers do not wait, and the claims of the last call started before the answer of the next."""
        workers = self._settings.concurrency
        if self._workers.waits != self._waits:
            self._waits, self._claim_limit = self._workers.waits, workers
        elif time.monotonic() - self._replied_at > _SOON:
            self._claim_limit = max(self._claim_limit // 2, workers)
        elif self._starved:
            self._claim_limit = min(2 * self._claim_limit, max(workers, _MOST_AT_ONCE))
        self._in_flight.claim_below = self._claim_limit // 2
        return self._claim_limit

    async def _without_claims(self, works: list[Work], delay: float) -> None:
        """The store is unavailable: let the lanes stand, or handle the events without it."""
        in_flight = self._in_flight
        heads = []
        for work in works:
            if work.interrupted is not None:
                self._forget(work)
            elif self._settings.handle_unclaimed:
                work.attempt += 1
                self._lifecycle.counts.unclaimed += 1
                in_flight.claimed.append(work)
            else:
                in_flight.remove(work)
                heads.append(work)
        if self._settings.handle_unclaimed:
            in_flight.wake_worker()
            return
        in_flight.lanes.requeue(heads)
        await asyncio.sleep(delay)

    def _on_reply(self, work: Work, reply: ClaimReply) -> None:
        if isinstance(reply, Claimed):
            self._claimed(work, reply.attempt, reply.redeliveries)
        elif isinstance(reply, Finished):
            self._lifecycle.counts.duplicates += 1
            self._lifecycle.settle(work)
        elif work.interrupted is not None:
            self._forget(work)
        else:
            self._in_flight.remove(work)
            self._in_flight.park(work, reply.seconds, "ClaimedByAnother" if work.cause is None else work.cause)

    def _claimed(self, work: Work, attempt: int, redeliveries: int) -> None:
        in_flight = self._in_flight
        work.claimed = True
        work.attempt, work.redeliveries = attempt, redeliveries
        self._lifecycle.counts.takeovers += redeliveries > 0
        if work.interrupted is not None or in_flight.stopped:
            self._lifecycle.release(work)
        elif not redeliveries or attempt != self._settings.max_attempts:
            in_flight.claimed.append(work)
        elif in_flight.suspect is None:
            in_flight.suspect, in_flight.suspect_started = work, False
        else:
            work.attempt -= 1
            work.cause = CONSUMER_DIED
            self._lifecycle.mark(work, FAILED, _NEXT_SUSPECT, counted=False)

    def _forget(self, work: Work) -> None:
        """The partition was revoked while the event was being claimed."""
        self._in_flight.remove(work)
        self._source.release(work.record)
        self._in_flight.lanes.finish(work)

    def _start_suspect(self) -> None:
        """Handle the suspect as soon as nothing else is in hand."""
        in_flight, suspect = self._in_flight, self._in_flight.suspect
        if suspect is None or in_flight.suspect_started:
            return
        if in_flight.held == in_flight.pending_dead_letters | {suspect}:
            log.warning(
                "Event handled alone, since its consumers died", extra=suspect.log_fields(self._settings.consumer)
            )
            in_flight.suspect_started = True
            in_flight.claimed.append(suspect)
            in_flight.wake_worker()
