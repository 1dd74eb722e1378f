"""The worker of one partition: takes batches, publishes them, evaluates the results and settles.

On the success path no object is allocated per event: batches are lists, and a batch without failures settles with one
position. Only after a failure do the events become ``Attempt``s with an outcome each (`redelivery`).

New events are published and results evaluated at once, in the call that brings them: most batches have one event, and a
task switch costs more than the rest of its delivery. Steps that wait, such as retries and commits, belong to the task,
and nothing else happens to the partition meanwhile. So no lock is needed, and new events never overtake parked ones.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any

from mailboat.delivery.batching import choose, total_bytes
from mailboat.delivery.counters import WorkerCounters
from mailboat.delivery.parked_keys import RELAY_DIED, ParkedKeys
from mailboat.delivery.publish import cant_encode, resolved, start_publish
from mailboat.delivery.redelivery import Attempt, Outcome, RetryLoop, evaluate, set_aside
from mailboat.delivery.stream import Checkpoint, DeliverySession, Stream
from mailboat.errors import EventRefused, SinkUnavailable
from mailboat.model import Message, OutboxEvent
from mailboat.sinks.protocol import ALL_DELIVERED, Failures
from mailboat.store.outbox_store import Cursor, Lease, OutboxStore, Park, Settlement, Window

CAUTIOUS_AFTER = 3
"""Crash count at one position from which events are sent one at a time. After one more crash, the first event is
refused as the cause."""

WATCHED_BATCHES = 20
"""Number of batches after a crash that are each settled before the next is sent. About as many may have been delivered
but not settled at the crash. A second crash then happens at the batch that causes it, and only that batch has to be
sent one event at a time."""


@dataclass(slots=True)
class QueuedChunk:
    window: Window
    events: Sequence[OutboxEvent]
    reached: int
    last: bool
    bytes: int
    taken: int = 0


@dataclass(slots=True)
class InFlightBatch:
    events: list[OutboxEvent]
    sequences: list[int]
    settlement: Settlement
    """Progress to commit if all events were delivered."""
    refused: Attempt | None
    """Event that can't be sent at all. The batch ends there, and the event is settled before any later event."""
    answer: asyncio.Future[Failures] = field(init=False)


class PartitionWorker:
    """Delivery of one partition of one subscription, as long as the lease is valid."""

    def __init__(self, cursor: Cursor, stream: Stream, store: OutboxStore, session: DeliverySession) -> None:
        self.lease: Lease = cursor.lease
        self.stream = stream
        self.counters = WorkerCounters()
        self.read_upto = cursor.position if cursor.window else 0
        self._session = session
        self._inbox: deque[QueuedChunk] = deque()
        self._batches: deque[InFlightBatch] = deque()
        self._sequence = cursor.sequence
        self._queued = 0
        self._queued_bytes = 0
        self._crashes_at_claim = cursor.crash_count if cursor.window else 0
        self._crashes = self._crashes_at_claim
        self._one_by_one_for = stream.settings.batch_size if self._crashes_at_claim >= CAUTIOUS_AFTER else 0
        self._watched_for = stream.settings.batch_size * WATCHED_BATCHES if self._crashes_at_claim else 0
        self._work = asyncio.Event()
        self._task_waits = False
        """Whether the task waits for work. Only then other calls advance the partition."""
        self._error: Exception | None = None
        """Error outside the task, which raises it."""
        self.room = asyncio.Event()
        """Set while the inbox accepts more events."""
        self.room.set()
        self._paused = False
        self._retry_loop = RetryLoop(self.lease, stream, session, self.counters)
        self.parked = ParkedKeys(self.lease, stream, store, session.committer, self._retry_loop)

    # -- interface for session and readers ---------------------------------------------------------------------------

    @property
    def starving(self) -> bool:
        """Whether the inbox is empty and no batch is in flight."""
        return not self._inbox and not self._batches

    @property
    def pending(self) -> int:
        """Number of events in the inbox or in flight, not yet settled."""
        return self._queued + sum(len(batch.events) for batch in self._batches)

    @property
    def crash_count(self) -> int:
        """Crash count at the current position, 0 once enough batches succeeded. Above 0, reads are kept small."""
        return self._crashes_at_claim if self._watched_for > 0 else 0

    def offer(self, window: Window, events: Sequence[OutboxEvent], reached: int, last: bool) -> None:
        """Append the next events of the window. Drop events seen before, read again for slower partitions."""
        if events and events[0].id <= self.read_upto:
            events = [event for event in events if event.id > self.read_upto]
        self.read_upto = 0 if last else max(reached, self.read_upto)
        if events or last:
            size = total_bytes(events)
            self._inbox.append(QueuedChunk(window, events, reached, last, size))
            self._queued += len(events)
            self._queued_bytes += size
            self._note_room()
            self._advance_now()

    def _note_room(self) -> None:
        settings = self.stream.settings
        if self._queued < 2 * settings.batch_size and self._queued_bytes < settings.batch_bytes:
            self.room.set()
        else:
            self.room.clear()

    def check_parked(self) -> None:
        self.parked.wake_in(0.0)
        self._work.set()

    def wake(self) -> None:
        """Check for work after a change, such as a renewed lease or an opened sink."""
        self._work.set()

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._retry_loop.pause(paused)
        self._work.set()

    def stop(self) -> None:
        """Finish the batches in flight, settle them and end the task."""
        self._retry_loop.stop()
        self._work.set()

    # -- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until stopped. If the lease is lost, the session cancels the task."""
        try:
            await self.parked.load()
            while not self._retry_loop.stopping:
                self._work.clear()
                if (step := self._advance()) is not None:
                    await step()
                else:
                    await self._wait()
            while self._batches:
                await self._complete()
        finally:
            # After a cancellation another relay may claim the partition, so no batch may remain in flight.
            answers = [batch.answer for batch in self._batches]
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    def _advance(self) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """Launch and complete batches. Return the next step that has to wait, or None if there is nothing to do."""
        while True:
            if self.parked.due() and self._active and not self._batches:
                return self.parked.retry
            if self._may_launch():
                if not self._retry_loop.stored_in_flight:
                    return partial(self._retry_loop.note_in_flight, True)
                self._launch()
            elif self._batches and self._batches[0].answer.done():
                if not self._is_plain(self._batches[0]):
                    return self._complete
                self._session.committer.settle(self._delivered())
            elif self._retry_loop.stored_in_flight and self._inbox and not self._batches and not self._active:
                return partial(self._retry_loop.note_in_flight, False)
            else:
                return None

    def _advance_now(self) -> None:
        """Advance without a task switch, or wake the task: for a step that waits, and to wait for parked events."""
        if self._task_waits and not self._work.is_set():
            try:
                if self._advance() is None and self.parked.seconds_until_due() is None:
                    return
            except Exception as error:
                self._error = error
        self._work.set()

    @property
    def _active(self) -> bool:
        return self.stream.ready and not self._paused

    async def _wait(self) -> None:
        """Wait for a change, which includes results of a batch, or until a parked event is due."""
        left = self.parked.seconds_until_due() if self._active and not self._batches else None
        self._task_waits = True
        try:
            async with asyncio.timeout(left):
                await self._work.wait()
        except TimeoutError:
            pass
        finally:
            self._task_waits = False
        if self._error is not None:
            raise self._error

    def _may_launch(self) -> bool:
        if not self._inbox or not self._active or self.parked.due() or self.parked.full:
            return False
        if self._batches and (
            self._watched_for > 0
            or not self.stream.sink.traits.stops_behind_failure
            or len(self._batches) >= self.stream.settings.max_in_flight
            or any(batch.refused for batch in self._batches)
            or any(batch.answer.done() for batch in self._batches)  # evaluate available results before sending more
        ):
            return False
        return self._session.lease_left() > 0

    def _launch(self) -> None:
        batch, messages, unsent = self._take()
        self.stream.on_checkpoint(Checkpoint.BATCH_TAKEN)
        if messages:
            batch.answer = start_publish(self.stream, messages)
            self.stream.on_checkpoint(Checkpoint.HANDED_OVER)
        else:
            batch.answer = resolved(unsent)
        batch.answer.add_done_callback(lambda _: self._advance_now())
        self._batches.append(batch)

    def _take(self) -> tuple[InFlightBatch, list[Message], Failures]:
        """Take a batch from the inbox, encode it and set aside the events of parked keys. Without a message, also
        return the results."""
        chunk, parked = self._inbox[0], self.parked.keys
        events, start = chunk.events, chunk.taken
        limits = self.stream.limits(one_by_one=self._one_by_one_for > 0)
        chosen = choose(events, start, limits, parked, chunk.bytes)
        first = self._sequence + 1 - start  # sequence number of an event = first + its index
        sent = [events[index] for index in chosen.sent]
        sequences = [first + index for index in chosen.sent]
        messages, reason = self._encode(sent, sequences)
        end, aside, refused, unsent = chosen.end, chosen.aside, None, ALL_DELIVERED
        if reason is not None:
            failed, made = chosen.sent[len(messages)], len(messages)
            if isinstance(reason, EventRefused):
                refused = Attempt(events[failed], first + failed, Outcome.REFUSED, reason)
                end = failed + 1
            elif messages:
                end = failed  # out of memory: send the events encoded so far
            else:
                unsent = {0: reason}
                made, end = 1, failed + 1
            del sent[made:], sequences[made:]
            aside = [index for index in aside if index < failed]
        asides = [Park(events[index], first + index) for index in aside]
        self._queued -= end - start
        self._sequence += end - start
        chunk.taken = end
        closes = False
        if end == len(events):
            self._inbox.popleft()
            self._queued_bytes -= chunk.bytes
            closes, position = chunk.last, chunk.reached
        else:
            position = events[end - 1].id
        self._note_room()
        settlement = Settlement(
            self.lease,
            chunk.window.window_snapshot,
            position,
            self._sequence,
            closes,
            park=tuple(asides),
            ordered=self.stream.settings.ordered,
        )
        return InFlightBatch(sent, sequences, settlement, refused), messages, unsent

    def _encode(
        self, events: list[OutboxEvent], sequences: list[int]
    ) -> tuple[list[Message], EventRefused | SinkUnavailable | None]:
        """Encode events up to the first that can't be sent; also return the reason (refused, or out of memory)."""
        stream, messages = self.stream, list[Message]()
        refusal = stream.sink.refusal
        try:
            if self._crashes > CAUTIOUS_AFTER and events:
                raise EventRefused(f"{self._crashes} relays died while delivering it", reason=RELAY_DIED)
            for message in stream.encoder.encode_all(
                events, sequences, partition=self.lease.key.partition, generation=stream.generation
            ):
                if (refused := refusal(message)) is not None:
                    raise refused
                messages.append(message)
        except EventRefused as error:
            return messages, error
        except Exception as error:
            return messages, cant_encode(events[len(messages)], error, stream.name)
        return messages, None

    def _is_plain(self, batch: InFlightBatch) -> bool:
        """Return whether all events of a completed batch were delivered, and nobody waits for its commit."""
        return not (
            batch.refused
            or batch.settlement.park
            or self._watched_for > 0
            or batch.answer.cancelled()
            or batch.answer.result()
        )

    async def _complete(self) -> None:
        """Evaluate the results of the first batch and settle it. After any failure, resolve all batches together."""
        batch, watched = self._batches[0], self._watched_for > 0
        if await batch.answer or batch.refused:
            self.stream.on_checkpoint(Checkpoint.ANSWERED)
            await self._resolve_failures()
        elif batch.settlement.park or watched:
            await self._session.committer.commit(self._delivered())
        else:
            self._session.committer.settle(self._delivered())

    def _delivered(self) -> Settlement:
        """Count the first batch as delivered and return its settlement."""
        batch, stream = self._batches.popleft(), self.stream
        stream.on_checkpoint(Checkpoint.ANSWERED)
        events = len(batch.events)
        self._note_success(events)
        if events:
            self._count_delivered(events)
            self.counters.delivered_at = stream.clock()
            stream.meters.delivered(batch.events[0].created_at, 1, events)
        self.parked.count += len(batch.settlement.park)
        return batch.settlement

    def _count_delivered(self, events: int) -> None:
        self.counters.delivered += events
        self.stream.meters.rate.add(self.stream.clock(), events)

    def _note_success(self, events: int) -> None:
        """Count events that were delivered without a crash, and relax the precautions."""
        self._crashes = 0
        self._one_by_one_for = max(0, self._one_by_one_for - events)
        self._watched_for = max(0, self._watched_for - events)

    async def _resolve_failures(self) -> None:
        """Resolve the outcome of every event in flight after a failure, in order, then settle all of them."""
        batches = list(self._batches)
        items: list[Attempt] = []
        unavailable: SinkUnavailable | None = None
        one_by_one = False
        for batch in batches:
            sent = [Attempt(event, sequence) for event, sequence in zip(batch.events, batch.sequences, strict=True)]
            reason, undecided = evaluate(sent, await batch.answer)
            unavailable, one_by_one = unavailable or reason, one_by_one or undecided
            aside = (Attempt(park.event, park.sequence, Outcome.ASIDE) for park in batch.settlement.park)
            items += sorted(chain(sent, aside, [batch.refused] if batch.refused else []), key=lambda i: i.sequence)
        set_aside(items, self.parked.keys, ordered=self.stream.settings.ordered)
        await self._retry_loop.deliver(
            items, self.parked.keys, unavailable=unavailable, one_by_one=one_by_one, wait_for_sink=True
        )
        done = list(takewhile(lambda item: item.outcome is not Outcome.PENDING, items))
        self._batches.clear()
        self._count_delivered(sum(item.outcome is Outcome.DELIVERED for item in done))
        if done:
            self._note_success(len(done))
            park, dead = await self.parked.dispose(done)
            settlement = replace(batches[-1].settlement, park=tuple(park), dead=tuple(dead))
            if len(done) < len(items):
                last = done[-1]
                settlement = replace(settlement, position=last.event.id, sequence=last.sequence, closes=False)
            await self._session.committer.commit(settlement)
