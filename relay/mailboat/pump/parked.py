"""The parked keys of one partition: who is parked and for how long, retries, and the end of it.

What is parked lives in the store; here is only the set of its keys, so that the pump lets nothing pass them, and the
time of the next attempt. A key leaves the set when its queue in the store is empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mailboat.outbox.store import Dead, Failure, Lease, OutboxStore, Park, Parked, Repark, Settlement
from mailboat.pump.announcing import Announcer
from mailboat.pump.delivery import Courier
from mailboat.pump.points import Point
from mailboat.pump.retry import OUTAGE_BACKOFF, Outage
from mailboat.pump.stream import DeathNotice, Stream
from mailboat.pump.verdicts import Fate, Item, set_aside

log = logging.getLogger(__name__)

RETRIES_AT_ONCE = 200
RECOUNT_EVERY = 5.0
"""Seconds between looks whether a parking lot that was full still is."""
MOMENT = 0.001
"""Seconds that are slept at least: a shorter sleep may end before the time that it was meant for."""

RELAY_DIED = "RelayDied"
"""The reason given to an event with which in hand several relays died."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of an event that was refused: it is dead, or it is parked in one of these ways."""

    attempts: int
    failure: Failure
    retry_in: float | None = None
    dead: bool = False
    doomed: bool = False

    @property
    def blocked(self) -> bool:
        """Until a person decides."""
        return self.retry_in is None and not self.dead


class ParkedKeys:
    """Parks, retries, buries."""

    def __init__(
        self,
        lease: Lease,
        stream: Stream,
        store: OutboxStore,
        settle: Callable[[Settlement], asyncio.Future[None]],
        courier: Courier,
    ) -> None:
        self.keys: set[str] = set()
        self.count = 0
        self._lease = lease
        self._stream = stream
        self._store = store
        self._settle = settle
        self._courier = courier
        self._announcer = Announcer(stream, courier)
        self._due_at: float | None = None
        self._outage = Outage(OUTAGE_BACKOFF)
        self._prepaid: set[int] = set()
        """Suspects whose next attempt is counted already: the sink was away when it was to be made."""
        self._not_before = 0.0
        self._counted_at = 0.0
        self._told_full = False

    @property
    def full(self) -> bool:
        """Whether so much is parked that nothing new should be taken."""
        return self.count >= self._stream.settings.max_parked

    @property
    def trouble(self) -> str | None:
        """Why nothing new is taken, for people to see."""
        if not self.full:
            return None
        return (
            f"Partition {self._lease.key.partition} has {self.count} parked events and takes nothing new: mend what "
            "refuses them, or decide about them with `mailboat parked`"
        )

    async def load(self) -> None:
        """What earlier owners parked. It is arranged anew: they may have been told to keep another order."""
        if keys := await self._count():
            ordered = self._stream.settings.ordered
            await self._settle(Settlement(self._lease, None, ordered=ordered, arrange=frozenset(keys)))
        if self.count:
            self.nudge()

    async def _count(self) -> set[str]:
        """People replay and drop parked events too: the store knows what is there, and of which keys."""
        keys, self.count = await self._store.parked_keys(self._lease)
        self.keys = set(keys) if self._stream.settings.ordered else set()
        self._counted_at = self._stream.clock()
        if self.full and not self._told_full:
            log.warning("%s", self.trouble, extra={"subscription": self._stream.name})
        self._told_full = self.full
        return keys

    def nudge(self) -> None:
        """Look now whether anything is due."""
        self._due_at = self._stream.clock()

    def due(self) -> bool:
        """Whether it is time to look."""
        return self.seconds_until_due() == 0.0

    def seconds_until_due(self) -> float | None:
        """How long the pump may sleep."""
        # A full lot may have nothing that is ever due, and only a person who makes room: look whether somebody did.
        times = [self._counted_at + RECOUNT_EVERY] if self.full else []
        if self._due_at is not None:
            times.append(self._due_at)
        if not times:
            return None
        left = max(min(times), self._not_before) - self._stream.clock()
        return max(left, MOMENT) if left > 0 else 0.0

    # -- parking -----------------------------------------------------------------------------------------------------

    async def dispose(self, items: Sequence[Item]) -> tuple[list[Park], list[Dead]]:
        """What becomes of the refused of a run and of those behind them. Their keys count as parked from now on."""
        parks: list[Park] = []
        dead: list[Dead] = []
        headless: set[str] = set()
        for item in items:
            key = item.event.key
            if item.fate is Fate.REFUSED:
                outcome = await self._refused(item)
                if isinstance(outcome, Dead):
                    dead.append(outcome)
                    if key is not None and key not in self.keys:
                        headless.add(key)
                    continue
                parks.append(outcome)
            elif item.fate is Fate.ASIDE:
                # Behind an event that is dead by now there is no head to wait for: the first one becomes it.
                retry_in = 0.0 if key in headless else None
                headless.discard(key or "")
                parks.append(Park(item.event, item.sequence, retry_in=retry_in))
            else:
                continue
            if key is not None and self._stream.settings.ordered:
                self.keys.add(key)
            self._wake_in(parks[-1].retry_in)
        self.count += len(parks)
        return parks, dead

    async def _refused(self, item: Item) -> Park | Dead:
        outcome = await self._outcome(item)
        if outcome.dead:
            return Dead(item.event, item.sequence, outcome.attempts, outcome.failure)
        return Park(
            item.event,
            item.sequence,
            outcome.attempts,
            outcome.retry_in,
            outcome.failure,
            blocked=outcome.blocked,
            suspect=outcome.failure.reason == RELAY_DIED and not outcome.blocked and not outcome.doomed,
            doomed=outcome.doomed,
        )

    async def _outcome(self, item: Item) -> Outcome:
        """Of one more refusal."""
        refusal = item.refusal
        assert refusal is not None
        policy, attempts = self._stream.settings.policy, item.attempts + 1
        failure = Failure(refusal.reason, str(refusal))
        if policy.exhausted(attempts, refusal.retryable):
            return await self._end(item, attempts, failure)
        return Outcome(attempts, failure, policy.backoff.delay(attempts, self._stream.random))

    async def _end(self, item: Item, attempts: int, failure: Failure) -> Outcome:
        """Of an event that gets no further attempt."""
        policy = self._stream.settings.policy
        if not policy.dead_letters:
            return Outcome(attempts, failure)
        notice = DeathNotice(
            item.event,
            item.sequence,
            *self._courier.series_of(item),
            attempts,
            failure.reason,
            failure.error,
            item.first_failed_at,
        )
        if await self._announcer.told(notice):
            return Outcome(attempts, failure, dead=True)
        # Who stops leaves it to its heir, who need not wait.
        return Outcome(attempts, failure, 0.0 if self._courier.stopping() else policy.backoff.ceiling, doomed=True)

    def _wake_in(self, seconds: float | None) -> None:
        if seconds is not None:
            at = self._stream.clock() + seconds
            self._due_at = at if self._due_at is None else min(self._due_at, at)

    # -- retrying ----------------------------------------------------------------------------------------------------

    async def retry(self) -> None:
        """Tries the heads whose time has come, then what waits behind those that made it."""
        settings = self._stream.settings
        heads, next_in = await self._store.due(self._lease, RETRIES_AT_ONCE, settings.batch_bytes)
        self._due_at = None
        self._wake_in(next_in if not heads else 0.0)
        if not heads:
            if self.full:
                await self._count()
            return
        ordered = settings.ordered
        self.keys.update(head.event.key for head in heads if head.event.key is not None and ordered)
        limit = settings.policy.max_attempts
        hopeful = [head for head in heads if not head.doomed and self._used(head) < limit]
        hopeless = [head for head in heads if head not in hopeful]
        await self._count_suspects(hopeful)
        items = [replace(_item(head), attempts=self._used(head)) for head in hopeful]
        away = await self._courier.deliver(items, (), patient=False)
        self._stream.passing(Point.PARKED_TRIED)
        for head, item in zip(hopeful, items, strict=True):
            if head.suspect and item.fate is Fate.PENDING:
                self._prepaid.add(head.ordinal)
            else:
                self._prepaid.discard(head.ordinal)
        self._outage = self._outage.recovered() if away is None else self._outage.failed()
        self._not_before = self._stream.clock() + self._outage.delay(self._stream.random)
        gone = await self._settle_parked(items, hopeless)
        for key in sorted({item.event.key for item in gone if item.event.key is not None and ordered}):
            await self._drain(key)
        await self._count()

    async def _count_suspects(self, heads: Sequence[Parked]) -> None:
        """An event that may kill the relay is counted before it is tried, or it would never be given up on."""
        backoff = self._stream.settings.policy.backoff
        counted = tuple(
            Repark(head.ordinal, head.attempts + 1, backoff.delay(head.attempts + 1, self._stream.random), None)
            for head in heads
            if head.suspect and head.ordinal not in self._prepaid
        )
        if counted:
            await self._settle(Settlement(self._lease, None, ordered=self._stream.settings.ordered, repark=counted))

    def _used(self, head: Parked) -> int:
        """How many attempts it has had: an outage costs nobody one, not even a suspect that was counted beforehand."""
        return head.attempts - (head.ordinal in self._prepaid)

    async def _drain(self, key: str) -> None:
        """Sends what waits behind a head that is gone, in order, until the queue is empty or fails again."""
        settings = self._stream.settings
        while True:
            queue = await self._store.queue(self._lease, key, settings.batch_size, settings.batch_bytes)
            if not queue:
                self.keys.discard(key)
                return
            # What has a fate or a suspicion of its own is not sent along: it becomes the head, and is seen to as such.
            special = (n for n, parked in enumerate(queue) if parked.blocked or parked.doomed or parked.suspect)
            items = [_item(parked) for parked in queue[: next(special, len(queue))]]
            await self._courier.deliver(items, (), patient=False)
            set_aside(items, ())
            gone = await self._settle_parked(items, [])
            if len(gone) < len(queue):
                return

    async def _settle_parked(self, items: Sequence[Item], hopeless: Sequence[Parked]) -> list[Item]:
        """Writes down how parked events fared; returns those that are gone from the parking lot."""
        gone = [item for item in items if item.fate is Fate.DELIVERED]
        unpark = tuple(_ordinal(item) for item in gone)
        outcomes = [(item, await self._outcome(item)) for item in items if item.fate is Fate.REFUSED]
        for head in hopeless:
            item, failure = _item(head), head.failure or Failure(RELAY_DIED, "relays died while delivering it")
            outcomes.append((item, await self._end(item, head.attempts, failure)))
        reparks: list[Repark] = []
        dead: list[Dead] = []
        for item, outcome in outcomes:
            ordinal, attempts, failure = _ordinal(item), outcome.attempts, outcome.failure
            if outcome.dead:
                dead.append(Dead(item.event, item.sequence, attempts, failure, ordinal))
                gone.append(item)
            else:
                reparks.append(
                    Repark(ordinal, attempts, outcome.retry_in, failure, blocked=outcome.blocked, doomed=outcome.doomed)
                )
        if unpark or reparks or dead:
            await self._settle(
                Settlement(
                    self._lease,
                    None,
                    ordered=self._stream.settings.ordered,
                    unpark=unpark,
                    repark=tuple(reparks),
                    dead=tuple(dead),
                )
            )
        for repark in reparks:
            self._wake_in(repark.retry_in)
        self.count -= len(gone)
        return gone


def _item(parked: Parked) -> Item:
    return Item(
        parked.event,
        parked.sequence,
        attempts=parked.attempts,
        replay=parked.replay,
        ordinal=parked.ordinal,
        series=parked.series,
        first_failed_at=parked.first_failed_at,
    )


def _ordinal(item: Item) -> int:
    assert item.ordinal is not None, "only parked events have a row in the parking lot"
    return item.ordinal
