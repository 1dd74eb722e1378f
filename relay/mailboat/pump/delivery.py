"""Sending what did not go smoothly: round after round until every event has a fate.

Used for batches in which something failed, and for parked events. Order within a key is kept by sending in order and by
putting aside what stands behind a refused event; an outage costs nobody an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from mailboat.errors import EventRefused, SinkUnavailable
from mailboat.events import Outgoing, event_bytes
from mailboat.outbox.store import Series
from mailboat.pump.handing import hand_over
from mailboat.pump.points import Point
from mailboat.pump.retry import OUTAGE_BACKOFF, Outage
from mailboat.pump.stream import Stream
from mailboat.pump.unexpected import cant_encode
from mailboat.pump.verdicts import Fate, Item, judge, set_aside


class Troubles(Protocol):
    """Where a courier notes what went wrong, for people to see."""

    last_error: str | None
    away: str | None
    refused: int


class Courier:
    """Sends the events of one partition until their fate is known."""

    def __init__(
        self,
        stream: Stream,
        partition: int,
        troubles: Troubles,
        lease_left: Callable[[], float],
        stopping: Callable[[], bool],
        in_hand: Callable[[bool], Awaitable[None]],
    ) -> None:
        """``in_hand`` is told before events are sent, and when the sink turned out to be unavailable."""
        self._stream = stream
        self._series = Series(partition, stream.generation)
        self._troubles = troubles
        self._lease_left = lease_left
        self.stopping = stopping
        self._in_hand = in_hand
        self._hurry = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def hurry(self) -> None:
        """Wait for nothing any more."""
        self._hurry.set()
        self._flowing.set()

    def pause(self, paused: bool) -> None:
        """Begin no further round, or do so again."""
        if paused and not self._hurry.is_set():
            self._flowing.clear()
        else:
            self._flowing.set()

    @property
    def paused(self) -> bool:
        return not self._flowing.is_set()

    async def deliver(
        self,
        items: Sequence[Item],
        parked: Collection[str],
        *,
        away: SinkUnavailable | None = None,
        one_by_one: bool = False,
        patient: bool,
    ) -> SinkUnavailable | None:
        """Until nothing is pending. ``patient`` waits for a sink that is away; otherwise that is the answer.

        ``away`` and ``one_by_one`` say how the last round ended. Ends early, with items pending, only when it should
        stop, or is paused and not patient: people may change what is parked meanwhile.
        """
        outage = Outage(OUTAGE_BACKOFF)
        while pending := [item for item in items if item.fate is Fate.PENDING]:
            if away is not None:
                self._troubles.away = self._troubles.last_error = str(away)
                await self._in_hand(False)
                if not patient:
                    return away
                outage = outage.failed()
                await self._pause(outage.delay(self._stream.random))
            if self.paused and not patient:
                return away
            await self._flowing.wait()
            if self.stopping():
                return away
            batch = self._batch(pending, one_by_one)
            messages, exhausted = self._encode(batch)
            if any(item.fate is Fate.REFUSED for item in batch):  # here: nothing behind them may go first
                set_aside(items, parked, ordered=self._stream.settings.ordered)
                continue
            if not messages:
                away = exhausted
                continue
            batch = batch[: len(messages)]
            if not await self.lease_holds():
                return away
            await self._in_hand(True)
            verdict = judge(batch, await hand_over(self._stream, messages))
            self._stream.passing(Point.ANSWERED)
            set_aside(items, parked, ordered=self._stream.settings.ordered)
            away = verdict.away
            if away is None:
                outage, self._troubles.away = outage.recovered(), None
            found = any(item.fate is Fate.REFUSED for item in batch)
            one_by_one = verdict.one_by_one or (one_by_one and not found)
        self._note_refusals(items)
        return None

    def _batch(self, pending: Sequence[Item], one_by_one: bool) -> list[Item]:
        settings, traits = self._stream.settings, self._stream.sink.traits
        if one_by_one:
            return [pending[0]]
        limit = min(settings.batch_size, traits.max_batch_messages)
        room = min(settings.batch_bytes, traits.max_batch_bytes)
        careful = settings.ordered and not traits.stops_behind_failure
        keys: set[str] = set()
        batch: list[Item] = []
        for item in pending[:limit]:
            key = item.event.key
            if careful and key is not None and key in keys:
                continue  # a later round's: at most one of a key on the way
            room -= event_bytes(item.event)
            if room < 0 and batch:
                break
            if key is not None:
                keys.add(key)
            batch.append(item)
        return batch

    def _encode(self, batch: Sequence[Item]) -> tuple[list[Outgoing], SinkUnavailable | None]:
        """The messages of those that are not refused; up to the one at which memory ran out, if it did."""
        messages: list[Outgoing] = []
        for item in batch:
            try:
                message = self.encode(item)
                if (refusal := self._stream.refusal(message)) is not None:
                    raise refusal
                messages.append(message)
            except EventRefused as error:
                item.fate, item.refusal = Fate.REFUSED, error
            except Exception as error:
                reason = cant_encode(item.event, error, self._stream.name)
                if isinstance(reason, SinkUnavailable):
                    return messages, reason
                item.fate, item.refusal = Fate.REFUSED, reason
        return messages, None

    def encode(self, item: Item) -> Outgoing:
        """The item's message, which says how often it was tried."""
        partition, generation = self.series_of(item)
        return self._stream.encoder.encode(
            item.event,
            sequence=item.sequence,
            partition=partition,
            generation=generation,
            attempt=item.attempts + 1,
            replay=item.replay,
        )

    def series_of(self, item: Item) -> Series:
        """What the item's sequence is a number of."""
        return item.series or self._series

    async def lease_holds(self) -> bool:
        """Waits until the lease covers a whole delivery; False when told to stop before."""
        while self._lease_left() <= self._stream.settings.timeout:
            if self.stopping():
                return False
            await self._pause(0.1)
        return True

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            return

    def _note_refusals(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.refusal is not None and item.fate is Fate.REFUSED:
                self._troubles.refused += 1
                self._troubles.last_error = str(item.refusal)
