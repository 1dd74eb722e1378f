"""The committer: polls for new events and commits the progress of all partitions, one tick after another.

Workers submit settlements. Plain progress inside a window is merged and may be delayed. A settlement that closes a
window or must be durable triggers a tick immediately, unless the end of the window can wait for the next event. The
same tick polls for new events for every cursor that is closed by then. Cursors are grouped by their
``settled_snapshot``, so one read serves all subscriptions at the head of the log.

If a group has more events than one read holds, ticks skip the group until its window is measured, perhaps for minutes.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, replace
from itertools import chain

from mailboat.delivery.poll_interval import PollInterval, WakeSettings, pause
from mailboat.delivery.stream import Checkpoint, CheckpointHook, Clock, DeliverySession
from mailboat.store.outbox_store import CursorGroup, CursorKey, Lease, Measured, OutboxStore, Settlement, TickResult

IN_FLIGHT_DELAY = 0.004
"""Delay in seconds before the next tick while batches from the previous tick are unacknowledged. One poll then serves
all partitions; without the delay, partitions poll separately on alternate ticks."""
SETTLE_WITHIN = 0.1
"""Longest delay of plain progress, and of the end of a window that can wait, in seconds. Settlements share a write."""
ACTIVE_EVERY = 20.0
"""Seconds after which an idle committer updates ``active_at``, which distinguishes an idle committer from a hung
one."""


@dataclass(slots=True)
class _Entry:
    """A cursor that the committer polls and commits for."""

    lease: Lease
    settled_snapshot: str | None
    """Snapshot up to which a closed cursor is settled; None while a window is open."""
    paused: bool = False
    cautious: bool = False
    """A relay died before the window was opened, so the next window is measured before it is read."""
    measuring: bool = False
    opened_after: int = 0
    """Number of wake-ups before the tick that opened the window."""
    windows: int = 0
    """Windows opened since the cursor was claimed."""

    @property
    def polls(self) -> bool:
        """Whether a tick polls for new events of this cursor."""
        return self.settled_snapshot is not None and not self.paused and not self.measuring


@dataclass(eq=False, repr=False)
class ProgressCommitter:
    store: OutboxStore
    wake_settings: InitVar[WakeSettings]
    clock: Clock
    session: DeliverySession
    on_checkpoint: CheckpointHook

    def __post_init__(self, wake_settings: WakeSettings) -> None:
        self._poll_interval = PollInterval(wake_settings)
        self._wakeup_requested = False
        self._wakeups = 0
        self._wakeups_before_tick = 0
        self._cursors: dict[CursorKey, _Entry] = {}
        self._pending: dict[CursorKey, Settlement] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._urgent = False
        self._wake_event = asyncio.Event()
        self._tick_lock = asyncio.Lock()
        self._last_tick = 0.0
        self._in_flight: set[CursorKey] = set()
        """Cursors whose window was opened by the last tick and is not settled yet."""
        self._measurements: dict[CursorGroup, asyncio.Task[None]] = {}
        self._measured: list[Measured] = []
        self.active_at = self.clock()
        """Time of the last sign of life, for the liveness check."""

    # -- cursors -----------------------------------------------------------------------------------------------------

    def add(self, lease: Lease, settled_snapshot: str | None, *, paused: bool, cautious: bool = False) -> None:
        """Add a claimed cursor; ``settled_snapshot`` is None while its window is open."""
        self._cursors[lease.key] = _Entry(lease, settled_snapshot, paused, cautious)
        self.wake()

    def remove(self, key: CursorKey) -> None:
        self._cursors.pop(key, None)
        self._pending.pop(key, None)
        self._in_flight.discard(key)
        for group, measurer in self._measurements.items():
            if not any(lease.key in self._cursors for lease in group.members):
                measurer.cancel()

    def pause(self, key: CursorKey, paused: bool) -> None:
        """Stop or resume opening windows for a cursor."""
        self._cursors[key].paused = paused
        self.wake()

    def at_head(self, key: CursorKey) -> bool:
        """Return whether all events found by the last poll are settled."""
        return self._cursors[key].polls

    def windows(self, key: CursorKey) -> int:
        return self._cursors[key].windows

    def settle(self, settlement: Settlement) -> None:
        """Queue progress for the next tick."""
        key = settlement.lease.key
        self._pending[key] = merged(self._pending.get(key), settlement)
        if settlement.closes:
            self._in_flight.discard(key)
            self._urgent |= not self._can_wait(key)
        self._wake_event.set()

    async def commit(self, settlement: Settlement) -> None:
        """Queue progress and return after its commit."""
        self.settle(settlement)
        await self._committed()

    async def _committed(self) -> None:
        committed = asyncio.get_running_loop().create_future()
        self._waiters.append(committed)
        self._urgent = True
        self._wake_event.set()
        await committed

    def _can_wait(self, key: CursorKey) -> bool:
        """Return whether the end of a window may be committed with the next event: writers notify, and none has done so
        since the window was opened."""
        entry = self._cursors.get(key)
        waits = self._wakeup_requested and self._poll_interval.idle
        return waits and entry is not None and entry.opened_after == self._wakeups

    def poll_by(self, wake: WakeSettings) -> None:
        self._poll_interval = PollInterval(wake)
        self._wake_event.set()

    def wake(self) -> None:
        """Poll immediately, after a change of the cursors."""
        self._poll_interval = self._poll_interval.due()
        self._wake_event.set()

    def notified(self) -> None:
        """Poll immediately, after a wake-up (NOTIFY)."""
        self._wakeups += 1
        self._poll_interval = self._poll_interval.woken() if self._wakeup_requested else self._poll_interval.due()
        self._wake_event.set()

    # -- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._until_needed()
            if self._cursors or self._waiters:
                async with self._tick_lock:
                    await self._tick()
            else:
                self._urgent = False
            self.active_at = self.clock()

    async def settled(self) -> None:
        """Wait until all progress queued so far is committed."""
        if self._pending or self._waiters:
            await self._committed()
        async with self._tick_lock:  # a running tick has emptied ``_waiters`` and may not have committed yet
            pass

    async def _until_needed(self) -> None:
        began = self.clock()
        await asyncio.sleep(pause(self._last_tick))
        while True:
            left = self._due(began) - self.clock()
            if left <= 0:
                return
            self._wake_event.clear()
            try:
                async with asyncio.timeout(min(left, ACTIVE_EVERY)):
                    await self._wake_event.wait()
            except TimeoutError:
                if left <= ACTIVE_EVERY:
                    return
            self.active_at = self.clock()

    def _due(self, began: float) -> float:
        if self._in_flight:
            began += IN_FLIGHT_DELAY
        if self._urgent:
            return began
        until = [began + SETTLE_WITHIN] if self._pending else []
        if any(entry.polls for entry in self._cursors.values()):
            until.append(began + self._poll_interval.wait(self._last_tick))
        return min(until, default=began + 1.0)

    async def _tick(self) -> None:
        self._in_flight.clear()
        settlements, self._pending = list(self._pending.values()), {}
        waiting, self._waiters = self._waiters, []
        measured = self._take_measured()
        self._urgent = False
        self.on_checkpoint(Checkpoint.SETTLING)
        began, self._wakeups_before_tick = self.clock(), self._wakeups
        groups = self._groups_to_poll(settlements)
        # If it raises, the session ends and cancels the tasks that wait for a commit.
        result = await self.store.tick(settlements, groups, measured)
        self._last_tick = self.clock() - began
        self.on_checkpoint(Checkpoint.SETTLED)
        for each in measured:
            self._note_measuring(each.members, False)
        self._record(settlements, result)
        if result.lost:
            members = chain(*(group.members for group in groups), *(each.members for each in measured))
            for entry in self._entries({*members, *(s.lease for s in settlements)}):
                if entry.lease.key in result.lost:
                    self.session.lease_lost(entry.lease.key)
        for future in waiting:
            if not future.done():
                future.set_result(None)
        await self._find_poll_interval(result, polled=bool(groups), by_clock=not settlements and not measured)

    def _groups_to_poll(self, settlements: list[Settlement]) -> list[CursorGroup]:
        """Group the closed cursors by ``settled_snapshot``, including the cursors that this tick closes."""
        closing = {s.lease.key: s.window_snapshot for s in settlements if s.closes}
        groups: dict[str, list[_Entry]] = defaultdict(list)
        for key, entry in self._cursors.items():
            settled_snapshot = closing.get(key, entry.settled_snapshot)
            if settled_snapshot is not None and not entry.paused and not entry.measuring:
                groups[settled_snapshot].append(entry)
        return [
            CursorGroup(
                settled_snapshot, tuple(entry.lease for entry in members), any(entry.cautious for entry in members)
            )
            for settled_snapshot, members in groups.items()
        ]

    def _record(self, settlements: list[Settlement], result: TickResult) -> None:
        closed = {settlement.lease: settlement.window_snapshot for settlement in settlements if settlement.closes}
        for entry in self._entries(closed):
            entry.settled_snapshot = closed[entry.lease]
        for entry in self._entries(result.advanced):
            entry.settled_snapshot, entry.cautious = result.advanced[entry.lease], False
        for opened in result.opened:
            for entry in self._entries(opened.members):
                entry.settled_snapshot, entry.cautious, entry.windows = None, False, entry.windows + 1
                entry.opened_after = self._wakeups_before_tick
                if opened.events is not None:  # do not delay ticks for a large window
                    self._in_flight.add(entry.lease.key)
            self.on_checkpoint(Checkpoint.WINDOW_OPENED)
            self.session.window_opened(opened)
        for group in result.overflowing:
            self._note_measuring(group.members, True)
            self._measurements[group] = self.session.spawn(self._measure(group))

    def _entries(self, leases: Iterable[Lease]) -> list[_Entry]:
        """Return the cursors that were not released meanwhile. A cursor claimed again has another lease."""
        entries = self._cursors
        return [entry for lease in leases if (entry := entries.get(lease.key)) is not None and entry.lease == lease]

    async def _measure(self, group: CursorGroup) -> None:
        try:
            window = await self.store.measure(group)
        finally:
            del self._measurements[group]
        if window is not None:
            self._measured.append(Measured(window, group.members))
        else:  # all cursors of the group moved: the next tick reports the lost leases
            self._note_measuring(group.members, False)
        self._urgent = True
        self._wake_event.set()

    def _take_measured(self) -> list[Measured]:
        """Return the measured windows to open. A cursor paused meanwhile is left out and polls again when resumed."""
        measured, self._measured = self._measured, []
        for each in measured:
            self._note_measuring([entry.lease for entry in self._entries(each.members) if entry.paused], False)
        return [
            Measured(each.window, members)
            for each in measured
            if (members := tuple(entry.lease for entry in self._entries(each.members) if entry.measuring))
        ]

    def _note_measuring(self, leases: Iterable[Lease], measuring: bool) -> None:
        for entry in self._entries(leases):
            entry.measuring = measuring

    async def _find_poll_interval(self, result: TickResult, *, polled: bool, by_clock: bool) -> None:
        now = self.clock()
        before = self._poll_interval
        notified = self._wakeups != self._wakeups_before_tick
        if not result.quiet or not polled:
            found = before.found(now, _events(result), by_clock=by_clock)
            waits = found.notified and not found.crowded(now) and not notified
            self._poll_interval = found.quiet(now) if waits else found
            # If no cursor polls for events, no wake-up is needed.
            if self._wakeup_requested and (
                self._poll_interval.crowded(now) or not self._poll_interval.notified or not polled
            ):
                await self.store.disable_wakeups()
                self._poll_interval, self._wakeup_requested = PollInterval(self._poll_interval.settings), False
            return
        if notified:  # perhaps by an event that was committed after the poll
            return
        poll_interval = before.quiet(now)
        if poll_interval.should_idle(now):
            await self.store.enable_wakeups()
            poll_interval, self._wakeup_requested = poll_interval.idled(), True
            self._urgent = True  # poll once more for events committed before writers were asked to notify
        elif before.idle:
            poll_interval = poll_interval.still_idle(await self.store.undecided_writers())
            if self._poll_interval is not before:  # a wake-up arrived during the query: keep the immediate poll
                return
        self._poll_interval = poll_interval


def _events(result: TickResult) -> int:
    """Return the number of events found, by the subscription with most of them."""
    counts: Counter[int] = Counter()
    for opened in result.opened:
        for key, events in (opened.events or {}).items():
            counts[key.subscription] += len(events)
    return max(counts.values(), default=1)


def merged(first: Settlement | None, second: Settlement) -> Settlement:
    """Merge two settlements of one cursor. Both concern the same window, or one concerns parked events only."""
    if first is None or first.lease != second.lease:
        return second
    windowed = second if second.window_snapshot is not None else first
    return replace(
        windowed,
        closes=first.closes or second.closes,
        park=first.park + second.park,
        unpark=first.unpark + second.unpark,
        dead=first.dead + second.dead,
        arrange=first.arrange | second.arrange,
        in_flight=first.in_flight if second.in_flight is None else second.in_flight,
    )
