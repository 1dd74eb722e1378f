"""The keeper: writes down everybody's progress, and looks for new events, in one transaction per tick.

Pumps hand it settlements. Plain progress inside a window can wait a little and is merged; what closes a window or
must not be lost is written at the next tick, which comes at once. The same tick looks for new events for every cursor
that is closed by then, grouped by what they have done, so that all subscriptions at the tip are read for once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from mailboat.outbox.store import CursorKey, Lease, Opened, OutboxStore, Settlement, TickResult, TipGroup
from mailboat.pump.points import Passing, Point, unheard
from mailboat.pump.rhythm import Rhythm, WakeSettings, pause
from mailboat.pump.stream import Clock

SETTLE_WITHIN = 0.1
"""Seconds that plain progress may wait to be written together."""


@dataclass(slots=True)
class _Entry:
    """A cursor in the keeper's book."""

    lease: Lease
    done: str | None
    """What it has settled, when closed; None while a window is open."""
    paused: bool = False


Handover = Callable[[Opened], None]
"""Takes a window that was just opened."""


class Keeper:
    """The progress of all partitions that a relay owns on one outbox."""

    def __init__(
        self,
        store: OutboxStore,
        wake: WakeSettings,
        clock: Clock,
        handover: Handover,
        lost: Callable[[CursorKey], None],
        passing: Passing = unheard,
    ) -> None:
        self._store = store
        self._clock = clock
        self._handover = handover
        self._lost = lost
        self._passing = passing
        self._rhythm = Rhythm(wake)
        self._bell_is_out = False
        self._book: dict[CursorKey, _Entry] = {}
        self._pending: dict[CursorKey, Settlement] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._urgent = False
        self._stir = asyncio.Event()
        self._last_tick = 0.0
        self.ticked_at = clock()

    # -- the book ----------------------------------------------------------------------------------------------------

    def enter(self, lease: Lease, done: str | None, *, paused: bool) -> None:
        """A cursor that was claimed; ``done`` is None while its window is open."""
        self._book[lease.key] = _Entry(lease, done, paused)
        self.ring()

    def strike(self, key: CursorKey) -> None:
        """A cursor that is not ours any more."""
        self._book.pop(key, None)
        self._pending.pop(key, None)

    def pause(self, key: CursorKey, paused: bool) -> None:
        """Open no new windows for it, or do so again."""
        entry = self._book.get(key)
        if entry is not None and entry.paused != paused:
            entry.paused = paused
            self.ring()

    def at_tip(self, key: CursorKey) -> bool:
        """Whether everything that was there at the last look is settled."""
        entry = self._book.get(key)
        return entry is not None and entry.done is not None and not entry.paused

    def settle(self, settlement: Settlement) -> asyncio.Future[None]:
        """Note progress. The future is done once it is committed; plain progress need not be waited for."""
        key = settlement.lease.key
        self._pending[key] = merged(self._pending.get(key), settlement)
        committed = asyncio.get_running_loop().create_future()
        self._waiting.append(committed)
        if settlement.closes or settlement.durable or settlement.awaited:
            self._urgent = True
            self._stir.set()
        return committed

    def ring(self) -> None:
        """Somebody rang, or something changed: look at once."""
        self._rhythm = self._rhythm.found()
        self._stir.set()

    # -- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks until cancelled."""
        while True:
            await self._until_needed()
            if self._book or self._waiting:
                await self._tick()
            else:
                self._urgent = False
            self.ticked_at = self._clock()

    async def settled(self) -> None:
        """Waits until all progress noted so far is committed."""
        if self._waiting:
            self._urgent = True
            self._stir.set()
            await asyncio.wait(set(self._waiting))

    async def _until_needed(self) -> None:
        began = self._clock()
        await asyncio.sleep(pause(self._last_tick))
        while not self._urgent:
            polls = any(entry.done is not None and not entry.paused for entry in self._book.values())
            until = [began + self._rhythm.wait(self._last_tick)] if polls else []
            if self._pending:
                until.append(began + SETTLE_WITHIN)
            left = min(until, default=began + 1.0) - self._clock()
            if left <= 0:
                return
            self._stir.clear()
            try:
                async with asyncio.timeout(left):
                    await self._stir.wait()
            except TimeoutError:
                return

    async def _tick(self) -> None:
        settlements, self._pending = list(self._pending.values()), {}
        waiting, self._waiting = self._waiting, []
        self._urgent = False
        try:
            self._passing(Point.SETTLING)
            began = self._clock()
            tips = self._tips(settlements)
            result = await self._store.tick(settlements, tips)
            self._last_tick = self._clock() - began
            self._passing(Point.SETTLED)
        except BaseException as error:
            for future in waiting:
                if not future.done():
                    future.cancel() if isinstance(error, asyncio.CancelledError) else future.set_exception(error)
                    future.add_done_callback(_retrieved)
            raise
        spoke_for = {s.lease for s in settlements} | {lease for group in tips for lease in group.members}
        self._record(settlements, result, spoke_for)
        for future in waiting:
            if not future.done():
                future.set_result(None)
        await self._find_rhythm(result)

    def _tips(self, settlements: list[Settlement]) -> list[TipGroup]:
        """Closed cursors, those that the same tick closes included, by what they have done."""
        closing = {s.lease.key: s.upto for s in settlements if s.closes}
        groups: dict[str, list[Lease]] = defaultdict(list)
        for key, entry in self._book.items():
            done = closing.get(key, entry.done)
            if done is not None and not entry.paused:
                groups[done].append(entry.lease)
        return [TipGroup(done, tuple(members)) for done, members in groups.items()]

    def _record(self, settlements: list[Settlement], result: TickResult, spoke_for: set[Lease]) -> None:
        """What the tick did. A cursor that was let go meanwhile, and maybe claimed anew, is another one by now."""
        for settlement in settlements:
            if settlement.closes and (entry := self._entry(settlement.lease)) is not None:
                entry.done = settlement.upto
        for advanced in result.advanced:
            for lease in advanced.members:
                if (entry := self._entry(lease)) is not None:
                    entry.done = advanced.done
        for opened in result.opened:
            for lease in opened.members:
                if (entry := self._entry(lease)) is not None:
                    entry.done = None
            self._passing(Point.WINDOW_OPENED)
            self._handover(opened)
        for lease in spoke_for:
            if lease.key in result.lost and self._entry(lease) is not None:
                self._lost(lease.key)

    def _entry(self, lease: Lease) -> _Entry | None:
        entry = self._book.get(lease.key)
        return entry if entry is not None and entry.lease == lease else None

    async def _find_rhythm(self, result: TickResult) -> None:
        now = self._clock()
        if not result.quiet:
            self._rhythm = self._rhythm.found()
            if self._bell_is_out:
                await self._store.awake()
                self._bell_is_out = False
            return
        rhythm = self._rhythm.quiet(now)
        if rhythm.should_sleep(now):
            await self._store.sleep()
            rhythm, self._bell_is_out = rhythm.slept(), True
            self._urgent = True  # one more look, for those who wrote before the doorbell hung out
        elif rhythm.asleep:
            rhythm = rhythm.polled_in_vain(await self._store.undecided_writers())
        self._rhythm = rhythm


def merged(first: Settlement | None, second: Settlement) -> Settlement:
    """Two settlements of one cursor as one. Both speak of the same window, or one only of parked events."""
    if first is None or first.lease != second.lease:
        return second
    windowed = second if second.upto is not None else first
    return replace(
        windowed,
        closes=first.closes or second.closes,
        awaited=first.awaited or second.awaited,
        park=first.park + second.park,
        repark=first.repark + second.repark,
        unpark=first.unpark + second.unpark,
        dead=first.dead + second.dead,
    )


def _retrieved(future: asyncio.Future[None]) -> None:
    """Nobody may wait for it any more; its error has been raised where it happened."""
    if not future.cancelled():
        future.exception()
