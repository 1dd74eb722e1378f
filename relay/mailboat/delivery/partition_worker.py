"""The worker of one partition: takes batches, publishes them, evaluates the results and settles.

On the success path no object is allocated per event: batches are lists, and a batch without failures settles with one
position. Only after a failure do the events become ``Attempt``s with an outcome each (`outcomes`).

One task runs a worker, so no lock is needed. While the worker retries parked events, it takes no new events. Therefore
new events of a key never overtake parked ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain

from mailboat.delivery.batching import choose, total_bytes
from mailboat.delivery.checkpoints import Checkpoint
from mailboat.delivery.delivery_session import DeliverySession
from mailboat.delivery.outcomes import Attempt, Outcome, judge, set_aside, settled_prefix
from mailboat.delivery.parked_keys import RELAY_DIED, ParkedKeys
from mailboat.delivery.publish import start_publish
from mailboat.delivery.redelivery import RetryLoop
from mailboat.delivery.stream import Stream
from mailboat.delivery.unexpected_errors import cant_encode
from mailboat.delivery.worker_counters import WorkerCounters
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
    """A chunk of a window in the inbox."""

    window: Window
    events: Sequence[OutboxEvent]
    reached: int
    last: bool
    bytes: int
    taken: int = 0


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight."""

    window: Window
    events: list[OutboxEvent]
    sequences: list[int]
    answer: asyncio.Task[Failures] | None
    asides: list[Park]
    position: int
    sequence: int
    closes: bool
    refused: Attempt | None = None
    """Event that can't be sent at all. The batch ends there, and the event is settled before any later event."""

    @property
    def landed(self) -> bool:
        return self.answer is None or self.answer.done()


class PartitionWorker:
    """Delivery of one partition of one subscription, as long as the lease is valid."""

    def __init__(
        self,
        cursor: Cursor,
        stream: Stream,
        store: OutboxStore,
        session: DeliverySession,
    ) -> None:
        self.lease: Lease = cursor.lease
        self.stream = stream
        self.counters = WorkerCounters()
        self.read_upto = cursor.position if cursor.window else 0
        self._session = session
        self._inbox: deque[QueuedChunk] = deque()
        self._flights: deque[InFlightBatch] = deque()
        self._sequence = cursor.sequence
        self._queued = 0
        self._queued_bytes = 0
        self._resumed = cursor.crash_count if cursor.window else 0
        self._deaths = self._resumed
        self._one_by_one_for = stream.settings.batch_size if self._resumed >= CAUTIOUS_AFTER else 0
        self._watched_for = stream.settings.batch_size * WATCHED_BATCHES if self._resumed else 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.stopping = False
        self._paused = False
        self._in_hand = True
        """Whether the store regards events of this partition as in flight."""
        self._retry_loop = RetryLoop(stream, cursor.lease.key.partition, self, session)
        self.parked = ParkedKeys(self.lease, stream, store, session, self._retry_loop)

    # -- interface for session and readers ---------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether the inbox accepts more events."""
        return self._room.is_set()

    @property
    def starving(self) -> bool:
        """Whether the inbox is empty and no batch is in flight."""
        return not self._inbox and not self._flights

    @property
    def pending(self) -> int:
        """Number of events in the inbox or in flight, not yet settled."""
        return self._queued + sum(len(flight.events) for flight in self._flights)

    @property
    def deaths(self) -> int:
        """Crash count at the current position, 0 once enough batches succeeded. Above 0, reads are kept small."""
        return self._resumed if self._watched_for > 0 else 0

    async def room(self) -> None:
        """Wait until the inbox accepts more events."""
        await self._room.wait()

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
            self._work.set()

    def _note_room(self) -> None:
        settings = self.stream.settings
        if self._queued < 2 * settings.batch_size and self._queued_bytes < settings.batch_bytes:
            self._room.set()
        else:
            self._room.clear()

    def nudge(self) -> None:
        """Check for parked events that are due."""
        self.parked.nudge()
        self._work.set()

    def wake(self) -> None:
        """Check for work after a change, such as a renewed lease or an opened sink."""
        self._work.set()

    def pause(self, paused: bool) -> None:
        """Stop or resume publishing."""
        self._paused = paused
        self._retry_loop.pause(paused)
        self._work.set()

    def stop(self) -> None:
        """Finish the batches in flight, settle them and end the task."""
        self.stopping = True
        self._retry_loop.hurry()
        self._work.set()

    # -- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until stopped. If the lease is lost, the session cancels the task."""
        try:
            await self.parked.load()
            while not self.stopping:
                self._work.clear()
                if self.parked.due() and self._active and not self._flights:
                    await self.parked.retry()
                elif self._may_launch():
                    if self._in_hand:
                        self._launch()
                    else:
                        await self.note_in_flight(True)
                elif self._flights and self._flights[0].landed:
                    await self._land()
                elif self._in_hand and self._inbox and not self._flights and not self._active:
                    await self.note_in_flight(False)
                else:
                    await self._wait()
            while self._flights:
                await self._land()
        finally:
            # After a cancellation another relay may claim the partition, so no batch may remain in flight.
            answers = [flight.answer for flight in self._flights if flight.answer is not None]
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def note_in_flight(self, in_flight: bool) -> None:
        """Store whether events are in flight, which decides whether a crash of this relay counts against an event.

        While a sink is unavailable, relays may restart any number of times. Such restarts must not make an event a
        dead letter.
        """
        if in_flight != self._in_hand:
            self._in_hand = in_flight
            await self._session.commit(Settlement(self.lease, None, in_hand=in_flight))

    @property
    def _active(self) -> bool:
        return self.stream.ready and not self._paused

    async def _wait(self) -> None:
        """Wait for a change, which includes results of a batch, or until a parked event is due."""
        left = self.parked.seconds_until_due() if self._active and not self._flights else None
        with suppress(TimeoutError):
            async with asyncio.timeout(left) if left is not None else nullcontext():
                await self._work.wait()

    def _may_launch(self) -> bool:
        if not self._inbox or not self._active or self.parked.due() or self.parked.full:
            return False
        if self._flights and (
            self._watched_for > 0
            or not self.stream.sink.traits.stops_behind_failure
            or len(self._flights) >= self.stream.settings.flights
            or any(flight.refused for flight in self._flights)
            or any(flight.landed for flight in self._flights)  # evaluate available results before sending more
        ):
            return False
        return self._session.lease_left() > 0

    def _launch(self) -> None:
        flight, messages = self._take()
        self.stream.passing(Checkpoint.BATCH_TAKEN)
        if messages:
            flight.answer = start_publish(self.stream, messages)
            self.stream.passing(Checkpoint.HANDED_OVER)
        if flight.answer is not None:
            flight.answer.add_done_callback(lambda _: self._work.set())
        self._flights.append(flight)

    def _take(self) -> tuple[InFlightBatch, list[Message]]:
        """Take a batch from the inbox, encode it and set aside the events of parked keys."""
        chunk, parked = self._inbox[0], self.parked.keys
        events, start = chunk.events, chunk.taken
        limits = self.stream.limits(one_by_one=self._one_by_one_for > 0)
        chosen = choose(events, start, limits, parked, chunk.bytes)
        first = self._sequence + 1 - start  # sequence number of an event = first + its index
        sent = [events[index] for index in chosen.sent]
        sequences = [first + index for index in chosen.sent]
        messages, obstacle = self._encode(sent, sequences)
        end, aside, refused, answer = chosen.end, chosen.aside, None, None
        if obstacle is not None:
            bad, made = chosen.sent[len(messages)], len(messages)
            if isinstance(obstacle, EventRefused):
                refused = Attempt(events[bad], first + bad, Outcome.REFUSED, obstacle)
                end = bad + 1
            elif messages:
                end = bad  # out of memory: send the events encoded so far
            else:
                answer = asyncio.ensure_future(_unsent(obstacle))
                made, end = 1, bad + 1
            del sent[made:], sequences[made:]
            aside = [index for index in aside if index < bad]
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
        flight = InFlightBatch(chunk.window, sent, sequences, answer, asides, position, self._sequence, closes, refused)
        return flight, messages

    def _encode(
        self, events: list[OutboxEvent], sequences: list[int]
    ) -> tuple[list[Message], EventRefused | SinkUnavailable | None]:
        """Encode events up to the first that can't be sent; also return the reason (refused, or out of memory)."""
        stream, messages = self.stream, list[Message]()
        refusal = stream.sink.refusal
        try:
            if self._deaths > CAUTIOUS_AFTER and events:
                raise EventRefused(f"{self._deaths} relays died while delivering it", reason=RELAY_DIED)
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

    async def _land(self) -> None:
        """Evaluate the results of the first flight and settle it. After any failure, resolve all flights together."""
        flight = self._flights[0]
        failures = await flight.answer if flight.answer is not None else ALL_DELIVERED
        self.stream.passing(Checkpoint.ANSWERED)
        if failures or flight.refused:
            await self._sort_out()
            return
        self._flights.popleft()
        watched = self._watched_for > 0
        self._survived(len(flight.events))
        self._count_delivered(len(flight.events))
        if flight.events:
            self.counters.note_delivery(self.stream.clock())
            self.stream.meters.delivered(flight.events[0].created_at, 1, len(flight.events))
        settlement = Settlement(
            self.lease,
            flight.window.window_snapshot,
            flight.position,
            flight.sequence,
            flight.closes,
            park=tuple(flight.asides),
            ordered=self.stream.settings.ordered,
        )
        self.parked.count += len(flight.asides)
        if flight.asides or watched:
            await self._session.commit(settlement)
        else:
            self._session.settle(settlement)

    def _count_delivered(self, events: int) -> None:
        self.counters.delivered += events
        self.stream.meters.rate.add(self.stream.clock(), events)

    def _survived(self, events: int) -> None:
        """Count events that were delivered without a crash, and relax the precautions."""
        self._deaths = 0
        self._one_by_one_for = max(0, self._one_by_one_for - events)
        self._watched_for = max(0, self._watched_for - events)

    async def _sort_out(self) -> None:
        """Resolve the fate of every event in flight after a failure, in order, then settle all of them."""
        flights = list(self._flights)
        items: list[Attempt] = []
        away: SinkUnavailable | None = None
        one_by_one = False
        for flight in flights:
            sent = [Attempt(event, sequence) for event, sequence in zip(flight.events, flight.sequences, strict=True)]
            failures = await flight.answer if flight.answer is not None else ALL_DELIVERED
            verdict = judge(sent, failures)
            away, one_by_one = away or verdict.away, one_by_one or verdict.one_by_one
            aside = (Attempt(park.event, park.sequence, Outcome.ASIDE) for park in flight.asides)
            items += sorted(chain(sent, aside, [flight.refused] if flight.refused else []), key=lambda i: i.sequence)
        set_aside(items, self.parked.keys, ordered=self.stream.settings.ordered)
        await self._retry_loop.deliver(items, self.parked.keys, away=away, one_by_one=one_by_one, patient=True)
        whole = settled_prefix(items) == len(items)
        done = items if whole else items[: settled_prefix(items)]
        self._flights.clear()
        self._count_delivered(sum(item.fate is Outcome.DELIVERED for item in done))
        if done:
            self._survived(len(done))
            window, last = flights[0].window, flights[-1]
            park, dead = await self.parked.dispose(done)
            position, sequence = (last.position, last.sequence) if whole else (done[-1].event.id, done[-1].sequence)
            await self._session.commit(
                Settlement(
                    self.lease,
                    window.window_snapshot,
                    position,
                    sequence,
                    whole and last.closes,
                    park=tuple(park),
                    dead=tuple(dead),
                    ordered=self.stream.settings.ordered,
                )
            )
        if not whole:
            self.stopping = True  # a patient delivery ends early only if the worker is stopped


async def _unsent(reason: SinkUnavailable) -> Failures:
    """Return the result for an event that was not published."""
    return {0: reason}
