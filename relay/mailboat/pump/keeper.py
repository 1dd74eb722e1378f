"""The keeper: writes down everybody's progress, and looks for new events, in one transaction per tick.

Pumps hand it settlements. Plain progress inside a window can wait a little and is merged; what closes a window or
must not be lost is written at the next tick, which comes at once. The same tick looks for new events for every cursor
that is closed by then, grouped by what they have done, so that all subscriptions at the tip are read for once.

A group for which there is more than one read holds steps aside until its window has been measured, which may take
minutes; a tick then opens it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mailboat.outbox.store import CursorKey, Lease, Measured, Opened, OutboxStore, Settlement, TickResult, TipGroup
from mailboat.pump.points import Passing, Point, unheard
from mailboat.pump.rhythm import Rhythm, WakeSettings, pause
from mailboat.pump.stream import Clock

LANDING = 0.004
"""Seconds that a tick waits for what the last one brought to land: then one look serves all that landed, where else it
would come a moment too early, and each partition would be looked at apart from the others, every other time."""
SETTLE_WITHIN = 0.1
"""Seconds that plain progress may wait to be written together."""
TURN_OVER = 5.0
"""Seconds after which a sleeping keeper turns over, so that its sleep can be told from its death."""


@dataclass(slots=True)
class _Entry:
    """A cursor in the keeper's book."""

    lease: Lease
    done: str | None
    """What it has settled, when closed; None while a window is open."""
    paused: bool = False
    cautious: bool = False
    """A relay died before its window was opened: the next one is measured before it is read."""
    measuring: bool = False
    """Its next window is being measured."""

    @property
    def looks(self) -> bool:
        """Whether a tick looks for new events for it."""
        return self.done is not None and not self.paused and not self.measuring


Handover = Callable[[Opened], None]
"""Takes a window that was just opened."""
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task whose failure somebody hears of."""


class Keeper:
    """The progress of all partitions that a relay owns on one outbox."""

    def __init__(
        self,
        store: OutboxStore,
        wake: WakeSettings,
        clock: Clock,
        handover: Handover,
        lost: Callable[[CursorKey], None],
        spawn: Spawn,
        passing: Passing = unheard,
    ) -> None:
        self._store = store
        self._clock = clock
        self._handover = handover
        self._lost = lost
        self._spawn = spawn
        self._passing = passing
        self._rhythm = Rhythm(wake)
        self._bell_is_out = False
        self._book: dict[CursorKey, _Entry] = {}
        self._pending: dict[CursorKey, Settlement] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._urgent = False
        self._stir = asyncio.Event()
        self._ticking = asyncio.Lock()
        self._last_tick = 0.0
        self._in_the_air: set[CursorKey] = set()
        """Whose windows, of those that the last tick opened, have not landed yet."""
        self._surveys: dict[TipGroup, asyncio.Task[None]] = {}
        self._measured: list[Measured] = []
        self.stirred_at = clock()
        """When it was last seen to be alive."""

    # -- the book ----------------------------------------------------------------------------------------------------

    def enter(self, lease: Lease, done: str | None, *, paused: bool, cautious: bool = False) -> None:
        """A cursor that was claimed; ``done`` is None while its window is open."""
        self._book[lease.key] = _Entry(lease, done, paused, cautious)
        self.ring()

    def strike(self, key: CursorKey) -> None:
        """A cursor that is not ours any more."""
        self._book.pop(key, None)
        self._pending.pop(key, None)
        self._in_the_air.discard(key)
        for group, survey in self._surveys.items():
            if not any(lease.key in self._book for lease in group.members):
                survey.cancel()

    def pause(self, key: CursorKey, paused: bool) -> None:
        """Open no new windows for it, or do so again."""
        entry = self._book.get(key)
        if entry is not None and entry.paused != paused:
            entry.paused = paused
            self.ring()

    def at_tip(self, key: CursorKey) -> bool:
        """Whether everything that was there at the last look is settled."""
        entry = self._book.get(key)
        return entry is not None and entry.looks

    def settle(self, settlement: Settlement) -> asyncio.Future[None]:
        """Note progress. The future is done once it is committed; plain progress need not be waited for."""
        key = settlement.lease.key
        self._pending[key] = merged(self._pending.get(key), settlement)
        if settlement.closes:
            self._in_the_air.discard(key)
        committed = asyncio.get_running_loop().create_future()
        self._waiting.append(committed)
        if settlement.closes or settlement.durable or settlement.awaited:
            self._urgent = True
            self._stir.set()
        return committed

    def poll_by(self, wake: WakeSettings) -> None:
        """Look for events by other settings from now on."""
        self._rhythm = Rhythm(wake)
        self._stir.set()

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
                async with self._ticking:
                    await self._tick()
            else:
                self._urgent = False
            self.stirred_at = self._clock()

    async def settled(self) -> None:
        """Waits until all progress noted so far is committed."""
        if self._waiting:
            self._urgent = True
            self._stir.set()
            await asyncio.wait(set(self._waiting))
        async with self._ticking:  # what a tick has taken up already is not waiting any more, and not written yet
            pass

    async def _until_needed(self) -> None:
        began = self._clock()
        await asyncio.sleep(pause(self._last_tick))
        while True:
            left = self._due(began) - self._clock()
            if left <= 0:
                return
            self._stir.clear()
            try:
                async with asyncio.timeout(min(left, TURN_OVER)):
                    await self._stir.wait()
            except TimeoutError:
                if left <= TURN_OVER:
                    return
            self.stirred_at = self._clock()

    def _due(self, began: float) -> float:
        """When the next tick should come, as far as can be told now."""
        if self._in_the_air:
            began += LANDING
        if self._urgent:
            return began
        until = [began + SETTLE_WITHIN] if self._pending else []
        if any(entry.looks for entry in self._book.values()):
            until.append(began + self._rhythm.wait(self._last_tick))
        return min(until, default=began + 1.0)

    async def _tick(self) -> None:
        self._in_the_air.clear()
        settlements, self._pending = list(self._pending.values()), {}
        waiting, self._waiting = self._waiting, []
        measured = self._take_measured()
        self._urgent = False
        try:
            self._passing(Point.SETTLING)
            began = self._clock()
            tips = self._tips(settlements)
            result = await self._store.tick(settlements, tips, measured)
            self._last_tick = self._clock() - began
            self._passing(Point.SETTLED)
        except BaseException as error:
            for future in waiting:
                if not future.done():
                    future.cancel() if isinstance(error, asyncio.CancelledError) else future.set_exception(error)
                    future.add_done_callback(_retrieved)
            raise
        for each in measured:
            self._note_measuring(each.members, False)
        asked = [*(lease for tip in tips for lease in tip.members), *(m for each in measured for m in each.members)]
        self._record(settlements, result, {s.lease for s in settlements}.union(asked))
        for future in waiting:
            if not future.done():
                future.set_result(None)
        await self._find_rhythm(result, looked=bool(tips))

    def _tips(self, settlements: list[Settlement]) -> list[TipGroup]:
        """Closed cursors, those that the same tick closes included, by what they have done."""
        closing = {s.lease.key: s.upto for s in settlements if s.closes}
        groups: dict[str, list[_Entry]] = defaultdict(list)
        for key, entry in self._book.items():
            done = closing.get(key, entry.done)
            if done is not None and not entry.paused and not entry.measuring:
                groups[done].append(entry)
        return [
            TipGroup(done, tuple(entry.lease for entry in members), any(entry.cautious for entry in members))
            for done, members in groups.items()
        ]

    def _record(self, settlements: list[Settlement], result: TickResult, spoke_for: set[Lease]) -> None:
        """What the tick did. A cursor that was let go meanwhile, and maybe claimed anew, is another one by now."""
        for settlement in settlements:
            if settlement.closes and (entry := self._entry(settlement.lease)) is not None:
                entry.done = settlement.upto
        for advanced in result.advanced:
            for lease in advanced.members:
                if (entry := self._entry(lease)) is not None:
                    entry.done, entry.cautious = advanced.done, False
        for opened in result.opened:
            for lease in opened.members:
                if (entry := self._entry(lease)) is not None:
                    entry.done, entry.cautious = None, False
                    if opened.events is not None:  # a large window takes its time
                        self._in_the_air.add(lease.key)
            self._passing(Point.WINDOW_OPENED)
            self._handover(opened)
        for group in result.overflowing:
            self._note_measuring(group.members, True)
            self._surveys[group] = self._spawn(self._measure(group))
        for lease in spoke_for:
            if lease.key in result.lost and self._entry(lease) is not None:
                self._lost(lease.key)

    def _entry(self, lease: Lease) -> _Entry | None:
        entry = self._book.get(lease.key)
        return entry if entry is not None and entry.lease == lease else None

    async def _measure(self, group: TipGroup) -> None:
        try:
            window = await self._store.measure(group)
        finally:
            del self._surveys[group]
        if window is not None:
            self._measured.append(Measured(window, group.members))
        else:  # nobody is where it was: the next look will tell whose they are
            self._note_measuring(group.members, False)
        self._urgent = True
        self._stir.set()

    def _take_measured(self) -> list[Measured]:
        """Windows to open now. Whoever was paused meanwhile will look anew when it goes on."""
        measured, self._measured = self._measured, []
        for each in measured:
            paused = [lease for lease in each.members if (entry := self._entry(lease)) is not None and entry.paused]
            self._note_measuring(paused, False)
        return [
            Measured(each.window, members)
            for each in measured
            if (members := tuple(lease for lease in each.members if self._is_measuring(lease)))
        ]

    def _note_measuring(self, leases: Iterable[Lease], measuring: bool) -> None:
        for lease in leases:
            if (entry := self._entry(lease)) is not None:
                entry.measuring = measuring

    def _is_measuring(self, lease: Lease) -> bool:
        entry = self._entry(lease)
        return entry is not None and entry.measuring

    async def _find_rhythm(self, result: TickResult, *, looked: bool) -> None:
        now = self._clock()
        if not result.quiet or not looked:  # where nobody waits for events nobody has to be told of them
            self._rhythm = self._rhythm.found()
            if self._bell_is_out:
                await self._store.awake()
                self._bell_is_out = False
            return
        before = self._rhythm
        rhythm = before.quiet(now)
        if rhythm.should_sleep(now):
            await self._store.sleep()
            rhythm, self._bell_is_out = rhythm.slept(), True
            self._urgent = True  # one more look, for those who wrote before the doorbell hung out
        elif rhythm.asleep:
            rhythm = rhythm.polled_in_vain(await self._store.undecided_writers())
            if self._rhythm is not before:  # somebody rang meanwhile, and is not to wait for the next poll
                return
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
        arrange=first.arrange | second.arrange,
        in_hand=first.in_hand if second.in_hand is None else second.in_hand,
    )


def _retrieved(future: asyncio.Future[None]) -> None:
    """Nobody may wait for it any more; its error has been raised where it happened."""
    if not future.cancelled():
        future.exception()
