"""Access of one relay to an outbox in memory. Every method is one atomic step.

Network effects are simulated: the outbox's ``latency`` is awaited before and after each step, and all steps fail while
the outbox is unavailable (``away``). Repartitioning is not supported.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

from mailboat.errors import ConfigError, DatabaseUnavailable, LeaseLost
from mailboat.model import event_bytes
from mailboat.store.leases import Heartbeat, Heartbeats
from mailboat.store.outbox_store import (
    Backlog,
    Chunk,
    Cursor,
    CursorGroup,
    CursorKey,
    Lag,
    Lease,
    Measured,
    Membership,
    Opened,
    Parked,
    PartitionOwner,
    RelayPeer,
    Settlement,
    Subscription,
    TickResult,
    Window,
)
from mailboat.store.settings import ReadLimits, RelayIdentity, StoreSettings
from mailboat_spec import EventSubscription, State, full_name
from support.memory_outbox.database import MemoryOutbox, MemoryRelay, Subscribed
from support.memory_outbox.rows import GENERATION, CursorRow, DeadRow, MemoryRow, ParkedRow, Snapshot

Answer = TypeVar("Answer")


class MemoryStore:
    """Access of one relay to an outbox in memory."""

    def __init__(self, outbox: MemoryOutbox, me: RelayIdentity, settings: StoreSettings | None = None) -> None:
        self._outbox = outbox
        self._me = me
        self._settings = settings or StoreSettings()
        self._serves: frozenset[int] = frozenset()
        self._bell = asyncio.Event()
        self._horizon = 0
        self._heartbeats = Heartbeats()

    async def _step(self, step: Callable[[], Answer]) -> Answer:
        await asyncio.sleep(self._outbox.latency())
        if self._outbox.away is not None:
            raise DatabaseUnavailable(self._outbox.away)
        answer = step()
        await asyncio.sleep(self._outbox.latency())
        return answer

    # -- beginning and end -------------------------------------------------------------------------------------------

    async def declare(
        self, subscriptions: Sequence[EventSubscription], *, may_lay_out: bool = True
    ) -> dict[int, Subscription]:
        """Create or update the subscriptions, and serve them."""
        return await self._step(partial(self._declare, subscriptions))

    def _declare(self, subscriptions: Sequence[EventSubscription]) -> dict[int, Subscription]:
        known = {found.subscription.name: number for number, found in self._outbox.subscriptions.items()}
        answer: dict[int, Subscription] = {}
        for declared in subscriptions:
            spec = declared.spec
            number = known.get(full_name(declared)) or self._outbox.number("subscription")
            paused = spec.state is State.PAUSED
            fresh = Subscription(number, full_name(declared), spec.partitions, GENERATION, paused)
            found = self._outbox.subscriptions.setdefault(number, Subscribed(fresh, declared))
            if found.subscription.partitions != spec.partitions:
                raise ConfigError("the number of partitions can't be changed in memory")
            if found.resource.spec.state is not spec.state:
                self._outbox.pause(number, paused)
            found.resource = declared
            start = self._outbox.snapshot() if spec.start.from_ == "Latest" else Snapshot(3, frozenset())
            for partition in range(spec.partitions):
                self._outbox.cursors.setdefault(CursorKey(number, partition), CursorRow(str(start)))
            answer[number] = found.subscription
        self._serves = frozenset(answer)
        return answer

    def withdraw(self, number: int) -> None:
        self._serves -= {number}

    async def join(self) -> None:
        """Register this relay."""
        await self._step(self._join)

    def _join(self) -> None:
        earlier = self._outbox.relays.get(self._me.id)
        if earlier is not None and earlier.locked:
            raise LeaseLost(f"another process runs as relay {self._me.id!r}")
        for cursor in self._outbox.cursors.values():
            if cursor.owner == self._me.id:
                cursor.owner = None
        relay = MemoryRelay(self._me.incarnation, self._serves, self._outbox.now(), self._settings.lease_ttl)
        self._outbox.relays[self._me.id] = relay

    async def close_unused(self) -> None:
        """Disable wake-ups. Called when this relay owns no partition."""
        await self.disable_wakeups()

    async def close(self, *, leave: bool) -> None:
        mine = self._outbox.relays.get(self._me.id)
        if mine is None or mine.incarnation != self._me.incarnation:
            return
        mine.locked = False
        if leave:
            self._outbox.bells.pop(self._me.id, None)
            del self._outbox.relays[self._me.id]

    # -- leases ------------------------------------------------------------------------------------------------------

    async def beat(self) -> Membership:
        return await self._step(self._beat)

    def _beat(self) -> Membership:
        outbox, now = self._outbox, self._outbox.now()
        mine = outbox.relays.get(self._me.id)
        if mine is None or mine.incarnation != self._me.incarnation:
            raise LeaseLost(f"relay {self._me.id!r} was declared dead or replaced by another process of that name")
        mine.beat_at, mine.serves = now, self._serves
        moment = asyncio.get_running_loop().time()
        latest = {relay: Heartbeat(peer.incarnation, str(peer.beat_at)) for relay, peer in outbox.relays.items()}
        silences = self._heartbeats.silences(latest, moment, moment)
        peers: list[RelayPeer] = []
        for relay, peer in sorted(outbox.relays.items()):
            overdue = not peer.locked and silences[relay] > self._settings.overdue_after
            dead = relay != self._me.id and (overdue or silences[relay] > peer.ttl)
            silent = not dead and relay != self._me.id and silences[relay] > self._settings.overdue_after
            peers.append(RelayPeer(relay, peer.serves, not dead, silent))
            if dead:
                del outbox.relays[relay]
                outbox.bells.pop(relay, None)
        holdings = tuple(
            PartitionOwner(key, cursor.owner, cursor.assigned_to)
            for key, cursor in sorted(outbox.cursors.items())
            if key.subscription in self._serves
        )
        states = {number: outbox.subscriptions[number].subscription for number in self._serves}
        due = {row.cursor for row in outbox.parked.values() if row.is_due(now)}
        return Membership(tuple(peers), holdings, states, frozenset(k for k in due if k.subscription in self._serves))

    async def claim(self, keys: Collection[CursorKey]) -> list[Cursor]:
        return await self._step(lambda: [self._take(key) for key in keys if self._is_free(key)])

    def _is_free(self, key: CursorKey) -> bool:
        owner = self._outbox.cursors[key].owner
        return owner == self._me.id or owner not in self._outbox.relays

    def _take(self, key: CursorKey) -> Cursor:
        cursor = self._outbox.cursors[key]
        paused = self._outbox.subscriptions[key.subscription].subscription.paused
        if not (cursor.released or cursor.owner == self._me.id or paused):
            cursor.crash_count = 1 if cursor.window_snapshot is None else cursor.crash_count + 1
        cursor.owner, cursor.released = self._me.id, False
        cursor.epoch = f"epoch-{self._outbox.number('epoch')}"
        lease = Lease(key, cursor.epoch)
        return Cursor(
            lease, cursor.settled_snapshot, cursor.window, cursor.position, cursor.sequence, cursor.crash_count
        )

    async def renew(self, leases: Collection[Lease]) -> list[Cursor]:
        holds = self._outbox.lease_holds
        return await self._step(lambda: [self._take(lease.key) for lease in leases if holds(lease)])

    async def release(self, leases: Collection[Lease]) -> None:
        await self._step(partial(self._release, leases))

    def _release(self, leases: Collection[Lease]) -> None:
        for lease in filter(self._outbox.lease_holds, leases):
            cursor = self._outbox.cursors[lease.key]
            cursor.owner, cursor.epoch, cursor.released = None, None, True

    # -- windows -----------------------------------------------------------------------------------------------------

    async def tick(
        self, settlements: Sequence[Settlement], groups: Sequence[CursorGroup], measured: Sequence[Measured] = ()
    ) -> TickResult:
        return await self._step(partial(self._tick, settlements, groups, measured))

    def _tick(
        self, settlements: Sequence[Settlement], groups: Sequence[CursorGroup], measured: Sequence[Measured]
    ) -> TickResult:
        lost = {settlement.lease.key for settlement in settlements if not self._settle(settlement)}
        window_snapshot = str(self._outbox.snapshot())
        opened: list[Opened] = []
        advanced: dict[Lease, str] = {}
        overflowing: list[CursorGroup] = []
        for group in groups:
            members = self._standing(group.members, group.settled_snapshot, lost)
            rows = self._outbox.between(group.settled_snapshot, window_snapshot)
            if not members or not (rows or len(groups) > 1):
                continue
            most = 0 if group.cautious else self._settings.limits.small_rows
            if len(rows) > most or _size(rows) > self._settings.limits.bytes:
                overflowing.append(replace(group, members=members))
                continue
            events = self._outbox.routed(rows, members)
            having = tuple(lease for lease in members if lease.key in events)
            moving = tuple(lease for lease in members if lease not in having)
            window = Window(group.settled_snapshot, window_snapshot)
            for lease in members:
                self._outbox.cursors[lease.key].look(window, has_events=lease in having)
            if having:
                opened.append(Opened(window, having, events))
            advanced |= dict.fromkeys(moving, window_snapshot)
        for each in measured:
            members = self._standing(each.members, each.window.settled_snapshot, lost)
            for lease in members:
                self._outbox.cursors[lease.key].look(each.window, has_events=True)
            if members:
                opened.append(Opened(each.window, members, None))
        return TickResult(frozenset(lost), tuple(opened), advanced, tuple(overflowing))

    def _standing(self, leases: Sequence[Lease], settled_snapshot: str, lost: set[CursorKey]) -> tuple[Lease, ...]:
        """Return the leases that hold and whose cursors are closed at the snapshot; add the others to ``lost``."""
        members = tuple(lease for lease in leases if lease.key not in lost and self._at_tip(lease, settled_snapshot))
        lost.update(lease.key for lease in leases if lease not in members)
        return members

    async def measure(self, group: CursorGroup) -> Window | None:
        return await self._step(partial(self._measure, group))

    def _measure(self, group: CursorGroup) -> Window | None:
        if not self._standing(group.members, group.settled_snapshot, set()):
            return None
        window_snapshot = str(self._outbox.snapshot())
        rows = self._outbox.between(group.settled_snapshot, window_snapshot)
        return Window(group.settled_snapshot, window_snapshot, rows[0].event.id, rows[-1].event.id)

    def _at_tip(self, lease: Lease, settled_snapshot: str) -> bool:
        cursor = self._outbox.cursors[lease.key]
        return (
            self._outbox.lease_holds(lease)
            and cursor.window_snapshot is None
            and cursor.settled_snapshot == settled_snapshot
        )

    def _settle(self, settlement: Settlement) -> bool:
        cursor = self._outbox.cursors.get(settlement.lease.key)
        if cursor is None or not self._outbox.lease_holds(settlement.lease):
            return False
        if settlement.window_snapshot is not None:
            if cursor.window_snapshot != settlement.window_snapshot:
                return False
            cursor.settle(settlement)
        if settlement.in_flight is not None:
            cursor.released = not settlement.in_flight
        self._set_aside(settlement)
        return True

    async def read(self, window: Window, members: Sequence[Lease], after: int, *, crash_count: int = 0) -> Chunk:
        return await self._step(partial(self._read, window, members, after, self._settings.limits.after(crash_count)))

    def _read(self, window: Window, members: Sequence[Lease], after: int, limits: ReadLimits) -> Chunk:
        if not any(
            self._outbox.lease_holds(m) and self._outbox.cursors[m.key].window_snapshot == window.window_snapshot
            for m in members
        ):
            return Chunk({}, after, last=True)
        rows = [
            row for row in self._outbox.between(window.settled_snapshot, window.window_snapshot) if row.event.id > after
        ]
        stretch = rows[:1]
        for row in rows[1:]:
            if len(stretch) == limits.rows or _size([*stretch, row]) > limits.bytes:
                break
            stretch.append(row)
        reached = stretch[-1].event.id if stretch else after
        return Chunk(self._outbox.routed(stretch, members), reached, last=len(stretch) == len(rows))

    # -- parked events -----------------------------------------------------------------------------------------------

    def _set_aside(self, settlement: Settlement) -> None:
        """Apply dead letters and removals, then repeated failures, then newly parked events, then recompute heads."""
        outbox, here, now = self._outbox, settlement.lease.key, self._outbox.now()
        for death in settlement.dead:
            outbox.dead.append(DeadRow(here, death.event, death.sequence, death.attempts, death.failure))
        gone = [*settlement.unpark, *(death.ordinal for death in settlement.dead if death.ordinal is not None)]
        touched = [row for ordinal in gone if (row := outbox.parked.pop(ordinal, None)) is not None]
        for park in settlement.park:
            if park.ordinal is not None and (row := outbox.parked.get(park.ordinal)) is not None:
                row.fail_again(park, now)
                touched.append(row)
        for park in (each for each in settlement.park if each.ordinal is None):
            row = ParkedRow.of(outbox.number("parked"), here, park, now)
            outbox.parked[row.ordinal] = row
            touched.append(row)
        if settlement.ordered:
            outbox.line_up(here, {row.event.key for row in touched if row.event.key is not None} | settlement.arrange)
        elif settlement.arrange:
            outbox.set_loose(here)

    async def parked_keys(self, lease: Lease) -> tuple[set[str], int]:
        return await self._step(partial(self._parked_keys, lease.key))

    def _parked_keys(self, here: CursorKey) -> tuple[set[str], int]:
        mine = [row.event.key for row in self._outbox.parked.values() if row.cursor == here]
        return {key for key in mine if key is not None}, len(mine)

    async def due(self, lease: Lease, limit: int, max_bytes: int) -> tuple[list[Parked], float | None]:
        return await self._step(partial(self._due, lease.key, limit, max_bytes))

    def _due(self, here: CursorKey, limit: int, max_bytes: int) -> tuple[list[Parked], float | None]:
        now = self._outbox.now()
        timed = [
            (row.next_attempt_at, row.ordinal, row)
            for row in self._outbox.parked.values()
            if row.cursor == here and row.next_attempt_at is not None
        ]
        heads = [row.as_read() for at, _, row in sorted(timed, key=lambda t: t[:2]) if at <= now]
        return _within(heads[:limit], max_bytes), min(((at - now).total_seconds() for at, _, _ in timed), default=None)

    async def queue(self, lease: Lease, key: str, limit: int, max_bytes: int) -> list[Parked]:
        return await self._step(partial(self._queue, lease.key, key, limit, max_bytes))

    def _queue(self, here: CursorKey, key: str, limit: int, max_bytes: int) -> list[Parked]:
        return _within([row.as_read() for row in self._outbox.queue(here, key)[:limit]], max_bytes)

    # -- waking, lag -------------------------------------------------------------------------------------------------

    async def wait_for_notification(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._bell.wait()
        except TimeoutError:
            return False
        self._bell.clear()
        return True

    async def enable_wakeups(self) -> None:
        await self._step(self._sleep)

    def _sleep(self) -> None:
        self._outbox.bells[self._me.id] = self._bell
        self._horizon = self._outbox.snapshot().xmax

    async def disable_wakeups(self) -> None:
        await self._step(lambda: self._outbox.bells.pop(self._me.id, None))

    async def undecided_writers(self) -> bool:
        return await self._step(lambda: self._outbox.snapshot().xmin < self._horizon)

    async def backlog(self, subscription: int) -> Backlog:
        return await self._step(partial(self._backlog, subscription))

    def _backlog(self, number: int) -> Backlog:
        outbox, bound, now = self._outbox, self._settings.lag_bound, self._outbox.now()
        found = outbox.subscriptions[number]
        cursors = {key.partition: row for key, row in outbox.cursors.items() if key.subscription == number}
        everything = outbox.between("3:3:", str(outbox.snapshot()))
        unseen = [
            r for r in everything if any(not Snapshot.parse(c.settled_snapshot).sees(r.xid) for c in cursors.values())
        ]
        waiting: dict[int, list[MemoryRow]] = defaultdict(list)
        for row in unseen[:bound]:
            partition = row.event.slot % found.subscription.partitions
            if row.wanted_by(found.resource.spec) and not cursors[partition].has_settled(row):
                waiting[partition].append(row)
        stopped = len(unseen) >= bound
        lags = {
            partition: Lag(len(rows), (now - rows[0].created_at).total_seconds() if rows else None, stopped)
            for partition in cursors
            if (rows := waiting[partition]) or stopped
        }
        lot = [row for row in outbox.parked.values() if row.cursor.subscription == number]
        parked = Counter(row.cursor.partition for row in lot)
        dead = sum(each.cursor.subscription == number for each in outbox.dead)
        return Backlog(lags, dict(parked), dead, sum(row.blocked for row in lot))


def _size(rows: Iterable[MemoryRow]) -> int:
    return sum(event_bytes(row.event) for row in rows)


def _within(parked: Sequence[Parked], max_bytes: int) -> list[Parked]:
    """Return the first event and those after it, as long as all fit into ``max_bytes``."""
    sizes = accumulate(event_bytes(each.event) for each in parked)
    return [each for n, (each, size) in enumerate(zip(parked, sizes, strict=True)) if n == 0 or size <= max_bytes]
