"""Life cycle of an event between its claim and its settlement.

| from | to | when |
|---|---|---|
| ready or claimed | handling | ``next_work``: a worker is free |
| handling | marked done, then settled | ``finished``: the handlers succeeded |
| handling | marked failed, then parked | an attempt failed; the next one is due after a back-off |
| handling | dead_lettered, marked dead, then settled | the last attempt failed, or the event can never be handled |
| handling | released | the partition was revoked, or the engine stops |

An event is settled at the source after its result is stored. If the process dies before, the source delivers the event
again, and the claim store has its state. Without a claim, a result takes effect at once.
"""

import logging
from collections.abc import Coroutine
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from mailboat.consumer.broker.availability import Availability
from mailboat.consumer.broker.claim_results import ClaimResults
from mailboat.consumer.broker.dead_letter_queue import DeadLetterQueue
from mailboat.consumer.broker.engine_state import EngineCounts, EngineSettings
from mailboat.consumer.broker.in_flight import InFlight
from mailboat.consumer.broker.interfaces import (
    CONSUMER_DIED,
    BrokerPoint,
    ClaimStore,
    ClaimsUnavailable,
    DeadLetters,
    DeadRecord,
    PassingPoint,
    Source,
)
from mailboat.consumer.broker.work import DEAD, DONE, FAILED, FOREVER, RELEASED, REVOKED, Mark, Work
from mailboat.consumer.dispatch import Counts
from mailboat.consumer.handler_outcomes import GIVEN_BACK, Refusal

log = logging.getLogger(__name__)

_NO_ATTEMPTS_LEFT: Final = "no attempts left"
_CLAIMED: Final = BrokerPoint.CLAIMED  # bound once: access to a member of an enum is slow
_HANDLED: Final = BrokerPoint.HANDLED
_MARKED_DONE: Final = BrokerPoint.MARKED_DONE


class EventLifecycle:
    """Moves events through the states of the table above. Implements ``Lifecycle``."""

    def __init__(
        self,
        in_flight: InFlight,
        source: Source,
        claims: ClaimStore | None,
        dead_letters: DeadLetters | None,
        settings: EngineSettings,
        handler_counts: Counts,
        *,
        passing: PassingPoint,
        random: Random,
    ) -> None:
        self._in_flight = in_flight
        self._source = source
        self._settings = settings
        self._handler_counts = handler_counts
        self._passing = passing
        self._random = random
        self.counts = EngineCounts()
        self.claims_availability = Availability("Claim store", log, settings.consumer, random)
        self.dead_letters_availability = Availability("Dead-letter topic", log, settings.consumer, random)
        wait = not settings.handle_unclaimed
        self._marks = None if claims is None else ClaimResults(claims, self.claims_availability, self, wait=wait)
        self._dead_letter_queue = (
            None if dead_letters is None else DeadLetterQueue(dead_letters, self.dead_letters_availability, self)
        )
        self._dead_in_a_row = 0

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run beside the workers: writers of results and of dead letters."""
        return [each.run() for each in (self._marks, self._dead_letter_queue) if each is not None]

    # -- start -------------------------------------------------------------------------------------------------------

    def next_work(self) -> Work | None:
        in_flight = self._in_flight
        if in_flight.stopped or in_flight.ending:
            return None
        if self._marks is not None:
            if not in_flight.claimed:
                return None
            work = in_flight.claimed.popleft()
            if len(in_flight.claimed) == in_flight.claim_below:  # claim the next ones while these are handled
                in_flight.claim_wake.set()
            return work
        while in_flight.lanes.ready:
            work = in_flight.lanes.ready.popleft()
            if work.record.replay_for is None or not self.is_foreign(work):
                in_flight.held.add(work)
                work.attempt += 1
                return work
        return None

    def is_foreign(self, work: Work) -> bool:
        """Settle a replayed dead letter that is addressed to another consumer."""
        addressee = work.record.replay_for
        if addressee is None or addressee == self._settings.consumer:
            return False
        self.counts.skipped += 1
        self.settle(work)
        return True

    def refusal_before(self, work: Work) -> Refusal | None:
        self._passing(_CLAIMED)
        if work.record.cannot_decode is not None:
            return Refusal("CannotDecode", work.record.cannot_decode, final=True)
        if work.attempt > self._settings.max_attempts:
            work.attempt -= 1
            return Refusal(CONSUMER_DIED, "the process died in every attempt", final=True)
        return None

    # -- result ------------------------------------------------------------------------------------------------------

    def finished(self, work: Work, refusal: Refusal | None, cause: BaseException | None, *, duplicate: bool) -> None:
        self._passing(_HANDLED)
        if refusal is None:
            self._dead_in_a_row = 0
            self.counts.duplicates += duplicate
            if work.claimed:
                self.mark(work, DONE)
            else:
                self._passing(_MARKED_DONE)
                self.settle(work)
            return
        if isinstance(cause, ClaimsUnavailable):
            self.claims_availability.failed(str(cause))
        self._failed(work, refusal, cause)

    def _failed(self, work: Work, refusal: Refusal, cause: BaseException | None) -> None:
        """Retry later, or give the event up."""
        if work.interrupted == REVOKED and refusal is GIVEN_BACK:
            self.release(work)
            return
        if refusal.reason != GIVEN_BACK.reason:
            self._handler_counts.refused += 1
            log.warning(
                "Event refused: %s",
                refusal.reason,
                extra=work.log_fields(self._settings.consumer),
                exc_info=cause if refusal.reason == "HandlerFailed" else None,
            )
        work.first_failed = work.first_failed or datetime.now(UTC)
        work.cause = refusal.reason
        if refusal.final or (refusal.counted and work.attempt >= self._settings.max_attempts):
            self._dead_letter(work, refusal)
            return
        if refusal.retry_in is not None:
            retry_in = refusal.retry_in.total_seconds()
        else:
            retry_in = self._settings.backoff.delay(max(work.attempt, 1), self._random)
        if not refusal.counted:
            work.attempt -= 1
        self.mark(work, FAILED, retry_in, counted=refusal.counted)

    def _dead_letter(self, work: Work, refusal: Refusal) -> None:
        """Write the dead letter, unless the engine stops: a shutdown can make handlers fail."""
        if self._in_flight.ending or self._in_flight.stopped:
            self.release(work)
            return
        if self._dead_letter_queue is None:
            work.cause = f"{refusal.reason}: {_NO_ATTEMPTS_LEFT}"
            self.mark(work, FAILED, FOREVER)
            return
        now = datetime.now(UTC)
        self._in_flight.pending_dead_letters.add(work)
        self._dead_letter_queue.add(
            work,
            DeadRecord(
                record=work.record,
                refusal=refusal,
                attempts=work.attempt,
                first_failed=work.first_failed or now,
                failed_at=now,
                consumer=self._settings.consumer,
                group=self._settings.group,
            ),
        )
        self._count_dead(refusal)

    def _count_dead(self, refusal: Refusal) -> None:
        """Stop the engine after ``stop_at`` dead letters in a row."""
        self._dead_in_a_row += 1
        if self._settings.stop_at is not None and self._dead_in_a_row >= self._settings.stop_at:
            self._in_flight.stopped = (
                f"{self._dead_in_a_row} events in a row became dead letters, the last one because of {refusal.reason}:"
                " fix the handler and restart the consumer"
            )
            log.error("Consumer stopped: %s", self._in_flight.stopped, extra={"consumer": self._settings.consumer})

    def dead_lettered(self, work: Work) -> None:
        self.counts.dead += 1
        self._passing(BrokerPoint.DEAD_LETTER_WRITTEN)
        self.mark(work, DEAD)

    def withdraw_dead_letters(self) -> None:
        """Withdraw dead letters of revoked partitions. The next owner of the partition writes them."""
        if self._dead_letter_queue is not None:
            for work in self._dead_letter_queue.withdraw():
                self.mark(work, FAILED)

    def release(self, work: Work) -> None:
        """Release the claim of an event without counting the attempt."""
        work.attempt = max(0, work.attempt - 1)
        self.mark(work, RELEASED)

    # -- mark and settlement -----------------------------------------------------------------------------------------

    def mark(self, work: Work, mark: Mark, retry_in: float = 0.0, *, counted: bool = True) -> None:
        """Store a result. Without a claim it takes effect at once."""
        if work.claimed and self._marks is not None:
            self._marks.add(work, mark, 0.0 if retry_in == FOREVER else retry_in, counted=counted)
        else:
            self.marked(work, mark, retry_in, held=True)

    def marked(self, work: Work, mark: Mark, retry_in: float, *, held: bool) -> None:
        if not held:
            self.counts.overlaps += 1
            log.warning("Claim was lost while the event was handled", extra=work.log_fields(self._settings.consumer))
        if mark is DONE:
            self._passing(_MARKED_DONE)
            self.settle(work)
        elif mark is DEAD:
            self._passing(BrokerPoint.MARKED_DEAD)
            self.settle(work)
        elif mark is RELEASED:
            self._released(work)
        else:
            self._park(work, retry_in)

    def settle(self, work: Work) -> None:
        """Settle the event at the source, and make the next event of its key ready."""
        in_flight = self._in_flight
        in_flight.remove(work)
        if not work.detached:
            self._source.settle(work.record)
        in_flight.lanes.finish(work)
        if in_flight.lanes.ready:
            in_flight.wake()

    def _park(self, work: Work, retry_in: float) -> None:
        in_flight = self._in_flight
        in_flight.remove(work)
        if work.detached or work.interrupted == REVOKED:
            in_flight.lanes.finish(work)
        elif self._dead_letter_queue is None and work.cause is not None and work.cause.endswith(_NO_ATTEMPTS_LEFT):
            in_flight.park(work, FOREVER, work.cause)
        else:
            in_flight.park(work, retry_in, work.cause or "")

    def _released(self, work: Work) -> None:
        in_flight = self._in_flight
        in_flight.remove(work)
        if not work.detached:
            self._source.release(work.record)
        if (in_flight.stopped or in_flight.ending) and work.interrupted is None and not work.detached:
            in_flight.park(work, FOREVER, work.cause or "Stopped")
        else:
            in_flight.lanes.finish(work)
