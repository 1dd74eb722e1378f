"""The parked keys of one partition: parking, retries and dead letters.

The store holds the parked events. This module caches the set of their keys, so that the worker sends no later event of
such a key, and the time of the next attempt. A key leaves the set when its queue in the store is empty.

If there is a dead-letter topic, an event becomes a dead letter only once its notice is acknowledged or definitely
refused. Until then the event stays parked (``pending_dead_letter``), and its key waits. Other keys must not wait. So
after one notice without a definite result, no partition of the subscription publishes to the topic until the back-off
has passed.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from mailboat.cloudevents import DeadLetterNotice, dead_letter_message
from mailboat.delivery.backoff import DEAD_TOPIC_BACKOFF, OUTAGE_BACKOFF
from mailboat.delivery.progress import ProgressCommitter
from mailboat.delivery.publish import exhaustion, log_origin, start_publish
from mailboat.delivery.redelivery import Attempt, Outcome, RetryLoop, set_aside
from mailboat.delivery.stream import Checkpoint, Stream
from mailboat.errors import DeliveryError, EventRefused
from mailboat.store.outbox_store import Dead, LastFailure, Lease, OutboxStore, Park, Parked, Settlement

log = logging.getLogger(__name__)

RETRIES_AT_ONCE = 200
RECOUNT_EVERY = 5.0
"""Seconds between recounts while the limit of parked events is reached."""
MOMENT = 0.001
"""Shortest wait in seconds: a shorter sleep may end before the intended time."""

RELAY_DIED = "RelayDied"
"""Failure reason of an event that was in flight when several relays crashed."""

_TOPIC_FIELDS: Final = ("spec.sink.kafka.topic", "spec.sink.pubsub.project and topic")
"""Fields that the errors of sinks name for a topic that does not exist."""


class ParkedKeys:
    def __init__(
        self, lease: Lease, stream: Stream, store: OutboxStore, committer: ProgressCommitter, retry_loop: RetryLoop
    ) -> None:
        self.keys: set[str] = set()
        self.count = 0
        self._lease = lease
        self._stream = stream
        self._ordered = stream.settings.ordered
        self._store = store
        self._committer = committer
        self._retry_loop = retry_loop
        self._due_at: float | None = None
        self._failures = 0
        """Consecutive retries in which the sink was unavailable."""
        self._prepaid: set[int] = set()
        """Crash suspects whose next attempt is already counted: the sink was unavailable when the attempt was due."""
        self._not_before = 0.0
        self._counted_at = 0.0
        self._logged_full = False

    @property
    def full(self) -> bool:
        """Whether the limit of parked events is reached, so that the worker takes no new events."""
        return self.count >= self._stream.settings.max_parked

    @property
    def problem(self) -> str | None:
        """Message for the status if the worker takes no new events, else None."""
        if not self.full:
            return None
        return (
            f"Partition {self._lease.key.partition} has {self.count} parked events and takes nothing new: correct what "
            "refuses them, or decide about them with `mailboat parked`"
        )

    async def load(self) -> None:
        """Load the keys parked by previous owners and rearrange them: the previous ordering setting may differ."""
        if keys := await self._count():
            await self._committer.commit(Settlement(self._lease, None, ordered=self._ordered, arrange=frozenset(keys)))
        if self.count:
            self.wake_in(0.0)

    async def _count(self) -> set[str]:
        """Reload keys and count from the store, since people also replay and drop parked events."""
        keys, self.count = await self._store.parked_keys(self._lease)
        self.keys = set(keys) if self._ordered else set()
        self._counted_at = self._stream.clock()
        if self.full and not self._logged_full:
            log.warning("%s", self.problem, extra={"subscription": self._stream.name})
        self._logged_full = self.full
        return keys

    def due(self) -> bool:
        return self.seconds_until_due() == 0.0

    def seconds_until_due(self) -> float | None:
        """Return how long the worker may wait; None if there is nothing to wait for."""
        # At the limit no event may ever become due, and only a person can make room. So recount periodically.
        times = [self._counted_at + RECOUNT_EVERY] if self.full else []
        if self._due_at is not None:
            times.append(self._due_at)
        if not times:
            return None
        left = max(min(times), self._not_before) - self._stream.clock()
        return max(left, MOMENT) if left > 0 else 0.0

    # -- parking -----------------------------------------------------------------------------------------------------

    async def dispose(self, items: Sequence[Attempt]) -> tuple[list[Park], list[Dead]]:
        """Decide about the refused events of a run and the events behind them. Their keys are parked from now on."""
        parks: list[Park] = []
        dead: list[Dead] = []
        headless: set[str] = set()
        for item in items:
            key = item.event.key
            if item.outcome is Outcome.REFUSED:
                decision = await self._decide(item)
                if isinstance(decision, Dead):
                    dead.append(decision)
                    if key is not None and key not in self.keys:
                        headless.add(key)
                    continue
                parks.append(decision)
            elif item.outcome is Outcome.ASIDE:
                # If the head became a dead letter, the first event behind it becomes the head.
                retry_in = 0.0 if key in headless else None
                headless.discard(key or "")
                parks.append(Park(item.event, item.sequence, retry_in=retry_in))
            else:
                continue
            if key is not None and self._ordered:
                self.keys.add(key)
            self.wake_in(parks[-1].retry_in)
        self.count += len(parks)
        return parks, dead

    async def _decide(self, item: Attempt) -> Park | Dead:
        """Decide about an event after one more refusal: park it for a retry, or give it no further attempt."""
        refusal = item.refusal
        assert refusal is not None
        settings, attempts = self._stream.settings, item.attempts + 1
        failure = LastFailure(refusal.reason, str(refusal))
        if settings.exhausted(attempts, refusal.retryable):
            return await self._end(item, attempts, failure)
        retry_in, suspect = settings.backoff.delay(attempts, self._stream.random), failure.reason == RELAY_DIED
        return Park(item.event, item.sequence, attempts, retry_in, failure, suspect=suspect, ordinal=item.ordinal)

    async def _end(self, item: Attempt, attempts: int, failure: LastFailure) -> Park | Dead:
        """Decide about an event that gets no further attempt: blocked, dead letter, or pending dead letter."""
        settings = self._stream.settings
        park = Park(item.event, item.sequence, attempts, None, failure, ordinal=item.ordinal)
        if not settings.dead_letters:
            return replace(park, blocked=True)
        notice = DeadLetterNotice(
            item.event,
            item.sequence,
            *self._retry_loop.series_of(item),
            attempts,
            failure.reason,
            failure.error,
            None if item.parked is None else item.parked.first_failed_at,
        )
        if await self._published(notice):
            return Dead(item.event, item.sequence, attempts, failure, item.ordinal)
        # If this relay is stopping, the next owner retries without delay.
        retry_in = 0.0 if self._retry_loop.stopping else settings.backoff.ceiling
        return replace(park, retry_in=retry_in, pending_dead_letter=True)

    async def _published(self, notice: DeadLetterNotice) -> bool:
        """Publish a notice if a topic is configured. Return False if the event must stay parked for now: the topic is
        unavailable or in back-off, the worker is stopping, or memory ran out."""
        stream, dead_topic, event_id = self._stream, self._stream.dead_topic, notice.event.event_id
        topic, about = stream.dead_letter_topic, {"subscription": stream.name}
        if topic is None:
            return True
        try:
            message = dead_letter_message(
                stream.encoder, notice, topic=topic, subscription=stream.name, failed_at=datetime.now(UTC)
            )
            refused = stream.sink.refusal(message)
        except Exception as error:  # otherwise the event could never be dead-lettered, and every relay would crash
            if (unavailable := exhaustion(error)) is not None:
                self._topic_unavailable(unavailable)
                return False
            text = f"Event {event_id} is dead, and the dead-letter topic did not get it; `mailboat dlq show` has it"
            log_origin(text, error, stream.name)
            return True
        if refused is None:
            if stream.clock() < dead_topic.not_before or self._retry_loop.stopping:
                return False
            if not await self._retry_loop.lease_holds():
                return False
            answer = (await start_publish(stream, [message])).get(0)
            stream.on_checkpoint(Checkpoint.DEAD_ANNOUNCED)
            if answer is not None and not isinstance(answer, EventRefused):
                self._topic_unavailable(answer)
                return False
            if dead_topic.problem is not None:
                log.info("Dead-letter topic is available again", extra=about)
            dead_topic.problem, dead_topic.failures = None, 0
            refused = answer
        if refused is not None:
            # An event too large for one topic is often too large for the other. Its key must not wait for a change.
            text = "Event %s is dead, and the dead-letter topic refused it; `mailboat dlq show` has it: %s"
            log.warning(text, event_id, refused, extra=about)
        return True

    def _topic_unavailable(self, answer: DeliveryError) -> None:
        stream, dead_topic = self._stream, self._stream.dead_topic
        message = dead_letter_topic_error(answer)
        problem = f"The dead-letter topic takes nothing, so what is given up on stays parked: {message}"
        if problem != dead_topic.problem:
            log.warning("%s", problem, extra={"subscription": stream.name})
        dead_topic.problem = problem
        dead_topic.failures += 1
        dead_topic.not_before = stream.clock() + DEAD_TOPIC_BACKOFF.delay(dead_topic.failures, stream.random)

    def wake_in(self, seconds: float | None) -> None:
        """Check for due events after this time at the latest; None: no event becomes due."""
        if seconds is not None:
            at = self._stream.clock() + seconds
            self._due_at = at if self._due_at is None else min(self._due_at, at)

    # -- retrying ----------------------------------------------------------------------------------------------------

    async def retry(self) -> None:
        """Retry the due heads, then send the events queued behind the heads that were settled."""
        settings = self._stream.settings
        heads, next_in = await self._store.due(self._lease, RETRIES_AT_ONCE, settings.batch_bytes)
        self._due_at = None
        self.wake_in(next_in if not heads else 0.0)
        if not heads:
            if self.full:
                await self._count()
            return
        self.keys.update(head.event.key for head in heads if head.event.key is not None and self._ordered)
        limit = settings.max_attempts
        retryable = [head for head in heads if not head.pending_dead_letter and self._used(head) < limit]
        exhausted = [head for head in heads if head not in retryable]
        await self._count_suspects(retryable)
        items = [replace(_item(head), attempts=self._used(head)) for head in retryable]
        unavailable = await self._retry_loop.deliver(items, (), wait_for_sink=False)
        self._stream.on_checkpoint(Checkpoint.PARKED_TRIED)
        for head, item in zip(retryable, items, strict=True):
            if head.suspect and item.outcome is Outcome.PENDING:
                self._prepaid.add(head.ordinal)
            else:
                self._prepaid.discard(head.ordinal)
        self._failures = 0 if unavailable is None else self._failures + 1
        self._not_before = self._stream.clock() + OUTAGE_BACKOFF.delay(self._failures, self._stream.random)
        unparked = await self._settle_parked(items, exhausted)
        for key in sorted({item.event.key for item in unparked if item.event.key is not None and self._ordered}):
            await self._drain(key)
        await self._count()

    async def _count_suspects(self, heads: Sequence[Parked]) -> None:
        """Count the attempt of a crash suspect beforehand: a crash would leave it uncounted, and retries endless."""
        backoff = self._stream.settings.backoff
        counted = tuple(
            Park(
                head.event,
                head.sequence,
                head.attempts + 1,
                backoff.delay(head.attempts + 1, self._stream.random),
                ordinal=head.ordinal,
            )
            for head in heads
            if head.suspect and head.ordinal not in self._prepaid
        )
        if counted:
            await self._committer.commit(Settlement(self._lease, None, ordered=self._ordered, park=counted))

    def _used(self, head: Parked) -> int:
        """Return the attempts used. An outage costs none, even for a crash suspect whose attempt is already counted."""
        return head.attempts - (head.ordinal in self._prepaid)

    async def _drain(self, key: str) -> None:
        """Send the events behind a settled head, in order, until the queue is empty or an event fails."""
        settings = self._stream.settings
        while True:
            queue = await self._store.queue(self._lease, key, settings.batch_size, settings.batch_bytes)
            if not queue:
                self.keys.discard(key)
                return
            # A blocked event, pending dead letter or crash suspect ends the batch: it is handled once it is the head.
            special = (
                n for n, parked in enumerate(queue) if parked.blocked or parked.pending_dead_letter or parked.suspect
            )
            items = [_item(parked) for parked in queue[: next(special, len(queue))]]
            await self._retry_loop.deliver(items, (), wait_for_sink=False)
            set_aside(items, ())
            unparked = await self._settle_parked(items, [])
            if len(unparked) < len(queue):
                return

    async def _settle_parked(self, items: Sequence[Attempt], exhausted: Sequence[Parked]) -> list[Attempt]:
        """Commit the results of parked events and return the items that are no longer parked."""
        unparked = [item for item in items if item.outcome is Outcome.DELIVERED]
        unpark = tuple(item.ordinal for item in unparked if item.ordinal is not None)
        decisions = [(item, await self._decide(item)) for item in items if item.outcome is Outcome.REFUSED]
        for head in exhausted:
            item, failure = _item(head), head.failure or LastFailure(RELAY_DIED, "relays died while delivering it")
            decisions.append((item, await self._end(item, head.attempts, failure)))
        unparked += [item for item, decision in decisions if isinstance(decision, Dead)]
        parks = tuple(decision for _, decision in decisions if isinstance(decision, Park))
        dead = tuple(decision for _, decision in decisions if isinstance(decision, Dead))
        if unpark or parks or dead:
            await self._committer.commit(
                Settlement(self._lease, None, ordered=self._ordered, unpark=unpark, park=parks, dead=dead)
            )
        for park in parks:
            self.wake_in(park.retry_in)
        self.count -= len(unparked)
        return unparked


def _item(parked: Parked) -> Attempt:
    return Attempt(parked.event, parked.sequence, attempts=parked.attempts, parked=parked)


def dead_letter_topic_error(error: DeliveryError) -> str:
    """Return the message of a sink's error with the field of the dead-letter topic in it."""
    text = str(error)
    for field in _TOPIC_FIELDS:
        text = text.replace(field, "spec.delivery.deadLetter.topic")
    return text
