"""One relay's view of an outbox in memory. Every method is one step that nobody can interrupt.

What a network adds is told from outside: the outbox's ``latency`` is awaited before and after each step, and an outbox
that is ``away`` makes all of them fail. The layout of a subscription can't be changed here.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

from mailboat.errors import ConfigError, DatabaseUnavailable, LeaseLost
from mailboat.outbox.declaring import Declared
from mailboat.outbox.leases import RelayIdentity
from mailboat.outbox.memory.database import MemoryOutbox, Relay, Subscribed
from mailboat.outbox.memory.rows import CursorRow, DeadRow, ParkedRow, Row, Snapshot
from mailboat.outbox.postgres import StoreSettings
from mailboat.outbox.store import (
    Advanced,
    Backlog,
    Chunk,
    Cursor,
    CursorKey,
    Holding,
    Lag,
    Lease,
    Opened,
    Parked,
    RelayPeer,
    Roster,
    Settlement,
    Subscription,
    TickResult,
    TipGroup,
    Window,
)
from mailboat_spec import State

Answer = TypeVar("Answer")


class MemoryStore:
    """One relay's view of an outbox in memory."""

    def __init__(self, outbox: MemoryOutbox, me: RelayIdentity, settings: StoreSettings | None = None) -> None:
        self._outbox = outbox
        self._me = me
        self._settings = settings or StoreSettings()
        self._serves: frozenset[int] = frozenset()
        self._bell = asyncio.Event()
        self._horizon = 0

    async def _step(self, step: Callable[[], Answer]) -> Answer:
        await asyncio.sleep(self._outbox.latency())
        if self._outbox.away is not None:
            raise DatabaseUnavailable(self._outbox.away)
        answer = step()
        await asyncio.sleep(self._outbox.latency())
        return answer

    # -- beginning and end -------------------------------------------------------------------------------------------

    async def declare(self, subscriptions: Sequence[Declared], *, may_lay_out: bool = True) -> dict[int, Subscription]:
        """Make the subscriptions known."""
        return await self._step(partial(self._declare, subscriptions))

    def _declare(self, subscriptions: Sequence[Declared]) -> dict[int, Subscription]:
        known = {found.subscription.name: number for number, found in self._outbox.subscriptions.items()}
        answer: dict[int, Subscription] = {}
        for declared in subscriptions:
            spec = declared.resource.spec
            number = known.get(declared.name) or self._outbox.number("subscription")
            paused = spec.state is State.PAUSED
            fresh = Subscription(number, declared.name, spec.partitions, 1, paused)
            found = self._outbox.subscriptions.setdefault(number, Subscribed(fresh, declared.resource))
            if found.subscription.partitions != spec.partitions:
                raise ConfigError("the number of partitions can't be changed in memory")
            if found.resource.spec.state is not spec.state:
                self._outbox.pause(number, paused)
            found.resource = declared.resource
            start = self._outbox.snapshot() if spec.start.from_.value == "Latest" else Snapshot(3, frozenset())
            for partition in range(spec.partitions):
                self._outbox.cursors.setdefault(CursorKey(number, partition), CursorRow(str(start)))
            answer[number] = found.subscription
        self._serves = frozenset(answer)
        return answer

    async def join(self) -> None:
        """Introduce this relay to the others."""
        await self._step(self._join)

    def _join(self) -> None:
        earlier = self._outbox.relays.get(self._me.id)
        if earlier is not None and earlier.locked:
            raise LeaseLost(f"another process runs as relay {self._me.id!r}")
        for cursor in self._outbox.cursors.values():
            if cursor.owner == self._me.id:
                cursor.owner = None
        now = self._outbox.now()
        self._outbox.relays[self._me.id] = Relay(
            self._me.incarnation, self._me.address, self._serves, now, now + self._ttl
        )

    @property
    def _ttl(self) -> timedelta:
        return timedelta(seconds=self._settings.lease_ttl)

    async def rest(self) -> None:
        """Nothing is owned."""

    async def close(self, *, leave: bool) -> None:
        mine = self._outbox.relays.get(self._me.id)
        if mine is None or mine.incarnation != self._me.incarnation:
            return
        mine.locked = False
        if leave:
            self._outbox.bells.pop(self._me.id, None)
            del self._outbox.relays[self._me.id]

    # -- leases ------------------------------------------------------------------------------------------------------

    async def beat(self) -> Roster:
        return await self._step(self._beat)

    def _beat(self) -> Roster:
        outbox, now = self._outbox, self._outbox.now()
        mine = outbox.relays.get(self._me.id)
        if mine is None or mine.incarnation != self._me.incarnation:
            raise LeaseLost(f"relay {self._me.id!r} was declared dead or replaced by another process of that name")
        mine.beat_at, mine.expires_at, mine.serves = now, now + self._ttl, self._serves
        peers = [
            RelayPeer(relay, peer.serves, peer.address, outbox.living(relay))
            for relay, peer in sorted(outbox.relays.items())
        ]
        for relay, peer in list(outbox.relays.items()):
            if not peer.locked and now - peer.beat_at > timedelta(seconds=self._settings.overdue_after):
                peers = [replace(p, alive=False) if p.id == relay else p for p in peers]
                del outbox.relays[relay]
                outbox.bells.pop(relay, None)
        holdings = tuple(
            Holding(key, cursor.owner, cursor.assigned_to)
            for key, cursor in sorted(outbox.cursors.items())
            if key.subscription in self._serves
        )
        states = {number: outbox.subscriptions[number].subscription for number in self._serves}
        due = {row.cursor for row in outbox.parked.values() if row.is_due(now)}
        return Roster(tuple(peers), holdings, states, frozenset(k for k in due if k.subscription in self._serves))

    async def claim(self, keys: Collection[CursorKey]) -> list[Cursor]:
        return await self._step(lambda: [self._take(key) for key in keys if self._is_free(key)])

    def _is_free(self, key: CursorKey) -> bool:
        owner = self._outbox.cursors[key].owner
        return owner == self._me.id or not self._outbox.living(owner)

    def _take(self, key: CursorKey) -> Cursor:
        cursor = self._outbox.cursors[key]
        if not cursor.released and cursor.owner != self._me.id:
            cursor.resumes = 0 if cursor.upto is None else cursor.resumes + 1
        cursor.owner, cursor.released = self._me.id, False
        cursor.epoch = f"epoch-{self._outbox.number('epoch')}"
        lease = Lease(key, cursor.epoch)
        return Cursor(lease, cursor.done, cursor.window, cursor.position, cursor.sequence, 1, cursor.resumes, cursor.hi)

    async def release(self, leases: Collection[Lease]) -> None:
        await self._step(partial(self._release, leases))

    def _release(self, leases: Collection[Lease]) -> None:
        for lease in filter(self._outbox.lease_holds, leases):
            cursor = self._outbox.cursors[lease.key]
            cursor.owner, cursor.epoch, cursor.released = None, None, True

    # -- windows -----------------------------------------------------------------------------------------------------

    async def tick(self, settlements: Sequence[Settlement], tips: Sequence[TipGroup]) -> TickResult:
        return await self._step(partial(self._tick, settlements, tips))

    def _tick(self, settlements: Sequence[Settlement], tips: Sequence[TipGroup]) -> TickResult:
        lost = {settlement.lease.key for settlement in settlements if not self._settle(settlement)}
        upto = str(self._outbox.snapshot())
        opened: list[Opened] = []
        advanced: list[Advanced] = []
        for group in tips:
            members = tuple(lease for lease in group.members if lease.key not in lost and self._at_tip(lease, group))
            lost.update(lease.key for lease in group.members if lease not in members)
            rows = self._outbox.between(group.done, upto)
            if not members or not (rows or len(tips) > 1):
                continue
            window, events = Window(group.done, upto), None
            if len(rows) > self._settings.limits.small_rows or _size(rows) > self._settings.limits.bytes:
                window = Window(group.done, upto, rows[0].event.id, rows[-1].event.id)
            else:
                events = self._outbox.routed(rows, members)
            having = tuple(lease for lease in members if events is None or lease.key in events)
            moving = tuple(lease for lease in members if lease not in having)
            for lease in members:
                self._outbox.cursors[lease.key].look(window, has_events=lease in having)
            if having:
                opened.append(Opened(window, having, events))
            if moving:
                advanced.append(Advanced(upto, moving))
        return TickResult(frozenset(lost), tuple(opened), tuple(advanced))

    def _at_tip(self, lease: Lease, group: TipGroup) -> bool:
        cursor = self._outbox.cursors[lease.key]
        return self._outbox.lease_holds(lease) and cursor.upto is None and cursor.done == group.done

    def _settle(self, settlement: Settlement) -> bool:
        cursor = self._outbox.cursors.get(settlement.lease.key)
        if cursor is None or not self._outbox.lease_holds(settlement.lease):
            return False
        if settlement.upto is not None:
            if cursor.upto != settlement.upto:
                return False
            cursor.settle(settlement)
        self._set_aside(settlement)
        return True

    async def read(self, window: Window, members: Sequence[Lease], after: int) -> Chunk:
        return await self._step(partial(self._read, window, members, after))

    def _read(self, window: Window, members: Sequence[Lease], after: int) -> Chunk:
        if not any(self._outbox.lease_holds(m) and self._outbox.cursors[m.key].upto == window.upto for m in members):
            return Chunk({}, after, last=True)
        rows = [row for row in self._outbox.between(window.done, window.upto) if row.event.id > after]
        limits = self._settings.limits
        stretch: list[Row] = []
        for row in rows:
            if window.highest is not None and (len(stretch) == limits.rows or _size(stretch) > limits.bytes):
                break
            stretch.append(row)
        reached = stretch[-1].event.id if stretch else after
        return Chunk(self._outbox.routed(stretch, members), reached, last=len(stretch) == len(rows))

    # -- parked events -----------------------------------------------------------------------------------------------

    def _set_aside(self, settlement: Settlement) -> None:
        """In the order that matters: what leaves, what failed again, what comes; then who is the head now."""
        outbox, here, now = self._outbox, settlement.lease.key, self._outbox.now()
        for death in settlement.dead:
            outbox.dead.append(DeadRow(here, death.event, death.sequence, death.attempts, death.failure))
        gone = [*settlement.unpark, *(death.ordinal for death in settlement.dead if death.ordinal is not None)]
        touched = [row for ordinal in gone if (row := outbox.parked.pop(ordinal, None)) is not None]
        for repark in settlement.repark:
            if (row := outbox.parked.get(repark.ordinal)) is not None:
                row.fail_again(repark, now)
                touched.append(row)
        for park in settlement.park:
            row = ParkedRow.of(outbox.number("parked"), here, park, now)
            outbox.parked[row.ordinal] = row
            touched.append(row)
        if settlement.ordered:
            outbox.line_up(here, {row.event.key for row in touched if row.event.key is not None})

    async def parked_keys(self, lease: Lease) -> tuple[set[str], int]:
        return await self._step(partial(self._parked_keys, lease.key))

    def _parked_keys(self, here: CursorKey) -> tuple[set[str], int]:
        mine = [row.event.key for row in self._outbox.parked.values() if row.cursor == here]
        return {key for key in mine if key is not None}, len(mine)

    async def due(self, lease: Lease, limit: int) -> tuple[list[Parked], float | None]:
        return await self._step(partial(self._due, lease.key, limit))

    def _due(self, here: CursorKey, limit: int) -> tuple[list[Parked], float | None]:
        now = self._outbox.now()
        timed = [
            (row.next_attempt_at, row.ordinal, row)
            for row in self._outbox.parked.values()
            if row.cursor == here and row.next_attempt_at is not None
        ]
        heads = [row.as_read() for at, _, row in sorted(timed, key=lambda t: t[:2]) if at <= now][:limit]
        return heads, min(((at - now).total_seconds() for at, _, _ in timed), default=None)

    async def queue(self, lease: Lease, key: str, limit: int) -> list[Parked]:
        return await self._step(lambda: [row.as_read() for row in self._outbox.queue(lease.key, key)[:limit]])

    # -- waking, lag -------------------------------------------------------------------------------------------------

    async def rung(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._bell.wait()
        except TimeoutError:
            return False
        self._bell.clear()
        return True

    async def sleep(self) -> None:
        await self._step(self._sleep)

    def _sleep(self) -> None:
        self._outbox.bells[self._me.id] = self._bell
        self._horizon = self._outbox.snapshot().xmax

    async def awake(self) -> None:
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
        unseen = [r for r in everything if any(not Snapshot.parse(c.done).sees(r.xid) for c in cursors.values())]
        waiting: dict[int, list[Row]] = defaultdict(list)
        for row in unseen[:bound]:
            partition = row.event.slot % found.subscription.partitions
            if row.wanted_by(found.resource.spec) and not cursors[partition].has_settled(row):
                waiting[partition].append(row)
        lags = {
            partition: Lag(len(rows), (now - rows[0].created_at).total_seconds(), len(unseen) >= bound)
            for partition, rows in waiting.items()
        }
        parked = Counter(row.cursor.partition for row in outbox.parked.values() if row.cursor.subscription == number)
        return Backlog(lags, dict(parked), sum(dead.cursor.subscription == number for dead in outbox.dead))


def _size(rows: Iterable[Row]) -> int:
    return sum(len(row.event.payload or b"") for row in rows)
