"""Delivery of failed batches and parked events, in rounds until every event has an outcome.

A run is the ordered list of events that were published and not yet settled. After every round each item is delivered,
refused, set aside behind a refused event of its key, or pending. Order within a key is kept by sending in order and by
setting aside. An outage costs no event an attempt (G4).
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from mailboat.delivery.backoff import OUTAGE_BACKOFF
from mailboat.delivery.batching import choose, total_bytes
from mailboat.delivery.counters import WorkerCounters
from mailboat.delivery.publish import cant_encode, start_publish
from mailboat.delivery.stream import Checkpoint, DeliverySession, Stream
from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable
from mailboat.model import Message, OutboxEvent
from mailboat.store.outbox_store import Lease, Parked, Series, Settlement


class Outcome(Enum):
    PENDING = "pending"
    DELIVERED = "delivered"
    REFUSED = "refused"
    ASIDE = "aside"
    """Waits behind a refused event of its key, or the key was already parked."""


@dataclass(slots=True)
class Attempt:
    """One event of a run with a failure."""

    event: OutboxEvent
    sequence: int
    outcome: Outcome = Outcome.PENDING
    refusal: EventRefused | None = None
    attempts: int = 0
    """Attempts counted before the current one."""
    parked: Parked | None = None
    """The event as it was parked; None for a new event."""

    @property
    def ordinal(self) -> int | None:
        return None if self.parked is None else self.parked.ordinal


def evaluate(items: Sequence[Attempt], failures: Mapping[int, DeliveryError]) -> tuple[SinkUnavailable | None, bool]:
    """Set the outcome of every item of one batch from the sink's results. Return the reason if the sink is unavailable,
    and whether to send single items, which get a definite result: one was refused and the sink can't identify it."""
    unavailable: SinkUnavailable | None = None
    refused = False
    for index, item in enumerate(items):
        match failures.get(index):
            case None:
                item.outcome = Outcome.DELIVERED
            case EventRefused() as refusal:
                item.outcome, item.refusal = Outcome.REFUSED, refusal
                refused = True
            case SinkUnavailable() as reason:
                unavailable = unavailable or reason
            case unclear if len(items) == 1:
                # A sink must return a definite result for a batch of one. If it does not, back off: no tight loop.
                unavailable = SinkUnavailable(f"the sink gave no definite answer: {unclear}")
    undecided = any(item.outcome is Outcome.PENDING for item in items)
    return unavailable, undecided and unavailable is None and not refused


def set_aside(items: Iterable[Attempt], parked: Collection[str], *, ordered: bool = True) -> None:
    """Set aside the items behind a refused event of their key. Idempotent."""
    if not ordered:
        return
    failed: set[str] = set()
    for item in items:
        key = item.event.key
        if key is None:
            continue
        if item.outcome is Outcome.REFUSED:
            if key in failed:
                item.outcome, item.refusal = Outcome.ASIDE, None  # only the first refusal of a key is certain
            failed.add(key)
        elif item.outcome is Outcome.PENDING and (key in failed or key in parked):
            item.outcome = Outcome.ASIDE


class RetryLoop:
    """Sender for the failed and parked events of one partition."""

    def __init__(self, lease: Lease, stream: Stream, session: DeliverySession, counters: WorkerCounters) -> None:
        self.stopping = False
        self.stored_in_flight = True
        """Whether the store regards events of this partition as in flight."""
        self._lease = lease
        self._stream = stream
        self._session = session
        self._counters = counters
        self._series = Series(lease.key.partition, stream.generation)
        self._interrupted = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    def stop(self) -> None:
        """End all waits immediately, because the worker is stopping."""
        self.stopping = True
        self._interrupted.set()
        self._unpaused.set()

    def pause(self, paused: bool) -> None:
        if paused and not self.stopping:
            self._unpaused.clear()
        else:
            self._unpaused.set()

    async def note_in_flight(self, in_flight: bool) -> None:
        """Store whether events are in flight. Only then a crash of this relay counts against an event: restarts during
        an outage of the sink must not make an event a dead letter."""
        if in_flight != self.stored_in_flight:
            self.stored_in_flight = in_flight
            await self._session.committer.commit(Settlement(self._lease, None, in_flight=in_flight))

    async def deliver(
        self,
        items: Sequence[Attempt],
        parked: Collection[str],
        *,
        unavailable: SinkUnavailable | None = None,
        one_by_one: bool = False,
        wait_for_sink: bool,
    ) -> SinkUnavailable | None:
        """Send until no item is pending. If the sink is unavailable: wait if ``wait_for_sink``, else return the reason.

        ``unavailable`` and ``one_by_one`` are the result of the previous round. The method returns early, with items
        pending, only if the worker is stopping, or if paused and not ``wait_for_sink``: a person may change parked
        events in a pause.
        """
        failures = 0
        while pending := [item for item in items if item.outcome is Outcome.PENDING]:
            if unavailable is not None:
                self._counters.note_error(str(unavailable), self._stream.clock())
                self._stream.health.unavailable(str(unavailable), self._stream.clock(), self._series.partition)
                await self.note_in_flight(False)
                if not wait_for_sink:
                    return unavailable
                failures += 1
                await self._pause(OUTAGE_BACKOFF.delay(failures, self._stream.random))
            if not self._unpaused.is_set() and not wait_for_sink:
                return unavailable
            await self._unpaused.wait()
            if self.stopping:
                return unavailable
            events = [item.event for item in pending]
            chosen = choose(events, 0, self._stream.limits(one_by_one=one_by_one), (), total_bytes(events))
            batch = [pending[index] for index in chosen.sent]
            messages, exhausted = self._encode(batch)
            if any(item.outcome is Outcome.REFUSED for item in batch):
                # Before sending: no later event of the key may pass.
                set_aside(items, parked, ordered=self._stream.settings.ordered)
                continue
            if not messages:
                unavailable = exhausted
                continue
            batch = batch[: len(messages)]
            if not await self.lease_holds():
                return unavailable
            await self.note_in_flight(True)
            unavailable, undecided = evaluate(batch, await start_publish(self._stream, messages))
            self._stream.on_checkpoint(Checkpoint.ANSWERED)
            set_aside(items, parked, ordered=self._stream.settings.ordered)
            if unavailable is None:
                failures = 0
                self._stream.health.reachable(self._stream.clock(), self._series.partition)
            self._note_deliveries(batch)
            found = any(item.outcome is Outcome.REFUSED for item in batch)
            one_by_one = undecided or (one_by_one and not found)
        self._note_refusals(items)
        return None

    def _encode(self, batch: Sequence[Attempt]) -> tuple[list[Message], SinkUnavailable | None]:
        """Encode the items and mark refused ones. If memory runs out, return the messages so far and the reason."""
        messages: list[Message] = []
        for item in batch:
            try:
                series = self.series_of(item)
                message = self._stream.encoder.encode(
                    item.event,
                    sequence=item.sequence,
                    partition=series.partition,
                    generation=series.generation,
                    attempt=item.attempts + 1,
                    replay=item.parked is not None and item.parked.replay,
                )
                if (refusal := self._stream.sink.refusal(message)) is not None:
                    raise refusal
                messages.append(message)
            except EventRefused as error:
                item.outcome, item.refusal = Outcome.REFUSED, error
            except Exception as error:
                reason = cant_encode(item.event, error, self._stream.name)
                if isinstance(reason, SinkUnavailable):
                    return messages, reason
                item.outcome, item.refusal = Outcome.REFUSED, reason
        return messages, None

    def series_of(self, item: Attempt) -> Series:
        """Return the series of the sequence number: of a new event, the current one of the partition."""
        return self._series if item.parked is None else item.parked.series

    async def lease_holds(self) -> bool:
        """Wait until the lease is renewed. Return False if the worker is stopped first."""
        while self._session.lease_left() <= 0:
            if self.stopping:
                return False
            await self._pause(0.1)
        return True

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._interrupted.wait()

    def _note_deliveries(self, batch: Sequence[Attempt]) -> None:
        for item in batch:
            if item.outcome is Outcome.DELIVERED:
                self._counters.delivered_at = self._stream.clock()
                self._stream.meters.delivered(item.event.created_at, item.attempts + 1, 1)

    def _note_refusals(self, items: Sequence[Attempt]) -> None:
        for item in items:
            if item.refusal is not None and item.outcome is Outcome.REFUSED:
                self._counters.refused += 1
                self._counters.note_error(str(item.refusal), self._stream.clock())
