"""One connected period of a relay: from registration to an orderly release, or to the loss of the database.

The session owns all state in memory. If the database becomes unavailable or another server answers, the session ends
with ``DatabaseUnavailable`` and its state is discarded, because none of it can be trusted.

Tasks: the *watch* (heartbeats, wake-ups), *follow* (claims and releases), the *guard* of the leases, the *committer*
(ticks), one per partition *worker*, one per *reader*, one per *sink* that is not open yet, and the *probe* (lag). They
share one event loop and need no locks. The package docstring has the states.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from datetime import timedelta
from typing import Any

from mailboat.delivery.counters import Totals
from mailboat.delivery.partition_worker import PartitionWorker
from mailboat.delivery.poll_interval import WakeSettings
from mailboat.delivery.progress import ProgressCommitter
from mailboat.delivery.rebalance import decide, live_relays, orphans, reporter
from mailboat.delivery.stream import Checkpoint, CheckpointHook, Clock, DeliverySession, Stream
from mailboat.delivery.window_feeder import WindowFeeder
from mailboat.errors import DatabaseUnavailable, LeaseLost, MailboatError
from mailboat.runtime.subscription_set import await_dead_letter_topic, open_sink
from mailboat.runtime.timings import Timings
from mailboat.store.outbox_store import (
    Backlog,
    Cursor,
    CursorKey,
    Lease,
    Membership,
    Opened,
    OutboxStore,
    Subscription,
    Window,
)

log = logging.getLogger(__name__)

_IDLE_LAG_EVERY = 5
"""Number of intervals between two lag queries for an idle subscription."""


@dataclass(slots=True)
class SubscriptionLag:
    """Lag of one subscription, as last queried. Delivery does not depend on it."""

    backlog: Backlog | None = None
    error: str | None = None
    """Error of the last query. ``backlog`` is older."""
    queried_at: float = -math.inf

    async def query(self, store: OutboxStore, subscription: Subscription, clock: Clock) -> None:
        try:
            self.backlog, self.error = await store.backlog(subscription.number), None
        except MailboatError as error:  # other tasks detect a database outage
            if self.error is None:
                log.warning("Lag query failed: %s", error, extra={"subscription": subscription.name})
            self.error = str(error)
        self.queried_at = clock()


@dataclass(slots=True)
class _Owned:
    worker: PartitionWorker
    task: asyncio.Task[None]


@dataclass(eq=False)
class RelaySession(DeliverySession):
    """State and tasks of a connected relay. `DeliverySession` documents the methods that the workers call."""

    store: OutboxStore
    me: str
    streams: dict[int, Stream]
    subscriptions: dict[int, Subscription]
    wake: InitVar[WakeSettings]
    timings: Timings
    totals: Totals
    clock: Clock
    on_checkpoint: CheckpointHook
    oldest_snapshot: Callable[[], timedelta] = timedelta
    membership: Membership = field(default_factory=lambda: Membership((), (), {}))
    owned: dict[CursorKey, _Owned] = field(default_factory=dict)
    reported: frozenset[int] = frozenset()
    """Pull subscriptions whose lag this relay reports. One relay reports all partitions of a subscription."""
    orphans: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Partitions by subscription whose owner is silent or missing, and whose lag this relay reports meanwhile."""
    lags: defaultdict[int, SubscriptionLag] = field(default_factory=lambda: defaultdict(SubscriptionLag))
    _readers: set[WindowFeeder] = field(default_factory=set)
    _releasing: set[CursorKey] = field(default_factory=set)
    _retirements: dict[asyncio.Task[None], int] = field(default_factory=dict)
    """Tasks that release partitions, with the subscription of each."""
    _follow_task: asyncio.Task[None] | None = None
    _unheld_since: dict[CursorKey, float] = field(default_factory=dict)
    _open_tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _withdrawing: set[int] = field(default_factory=set)
    _admitted_at: float = -math.inf
    _group: asyncio.TaskGroup = field(init=False)
    _stop: asyncio.Event = field(init=False)

    def __post_init__(self, wake: WakeSettings) -> None:
        self.committer = ProgressCommitter(self.store, wake, self.clock, self, self.on_checkpoint)
        self._lease_until = self.clock() + self.timings.trusted  # the leases began when the store was joined

    async def run(self, stop: asyncio.Event, *extra: Coroutine[Any, Any, None]) -> None:
        """Run until ``stop`` is set or the database is lost. ``extra`` is cancelled with it, and its errors end it."""
        self._stop = stop
        try:
            async with asyncio.TaskGroup() as self._group:
                works = (self._watch(stop), self._guard_leases(), self.committer.run(), self._probe(), *extra)
                background = [self._group.create_task(work) for work in works]
                for stream in self.streams.values():
                    self._open(stream)
                await stop.wait()  # heartbeats continue until the last batch is settled
                if self._follow_task is not None:
                    self._follow_task.cancel()  # it would claim released partitions again
                while self.owned or self._retirements:  # a renewal in progress may start workers again
                    self._release(self.owned)
                    await self._released()  # releasing partitions needs the committer
                for task in (*background, *self._open_tasks.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _primary_error(errors) from errors

    def admit(self, subscription: Subscription, stream: Stream) -> None:
        """Start to deliver a subscription that is declared in the store, independently of the others."""
        self.streams[subscription.number] = stream
        self.subscriptions[subscription.number] = subscription
        self._admitted_at = self.clock()
        self._open(stream)

    async def withdraw(self, number: int, *, keep: bool) -> None:
        """Stop delivering a subscription: finish the batches in flight, settle, and release its partitions.

        ``keep``: do not release the partitions, because this relay admits the subscription again immediately.
        """
        self._withdrawing.add(number)
        self.reported -= {number}
        self._release([key for key in self.owned if key.subscription == number], keep=keep)
        await self._released(number)
        self._open_tasks.pop(number).cancel()
        del self.streams[number], self.subscriptions[number]
        self.lags.pop(number, None)
        self._withdrawing.discard(number)
        self.store.withdraw(number)

    def _open(self, stream: Stream) -> None:
        self._open_tasks[stream.number] = self._group.create_task(self._start_sink(stream))

    async def _start_sink(self, stream: Stream) -> None:
        await open_sink(stream)
        for worker in self.workers(stream.number):
            worker.check_parked()
        await await_dead_letter_topic(stream)

    def workers(self, number: int) -> list[PartitionWorker]:
        return [owned.worker for key, owned in self.owned.items() if key.subscription == number]

    async def _watch(self, stop: asyncio.Event) -> None:
        """Send heartbeats. Claims run in a task of their own: a slow one must not delay the next heartbeat."""
        while True:
            began = self.clock()
            membership = await self.store.beat()
            self._lease_until = began + self.timings.trusted
            if not stop.is_set() and (self._follow_task is None or self._follow_task.done()):
                self._follow_task = self._group.create_task(self._follow(membership, began))
            while (left := began + self.timings.beat_every - self.clock()) > 0:
                if await self.store.wait_for_notification(left):
                    self.committer.notified()

    async def _guard_leases(self) -> None:
        """End the session, and with it all calls to sinks, before another relay may take over the partitions."""
        while (left := self.lease_left()) > 0:  # noqa: ASYNC110 - a heartbeat moves the end and wakes nobody
            await asyncio.sleep(left)
        raise DatabaseUnavailable(
            f"no heartbeat reached the database for {self.timings.trusted:.0f} s, so this relay gave up its"
            " partitions: others may take them over"
        )

    async def _follow(self, membership: Membership, queried_at: float) -> None:
        if queried_at <= self._admitted_at:  # the query may not include a subscription that was admitted since
            return
        before, self.membership = self.membership, membership
        now = self.clock()
        self._notice_changes(membership.subscriptions)
        alive = live_relays(membership)
        self._log_peers(alive, live_relays(before))
        served = self._served()
        self.reported = frozenset(
            each for each in served if self.streams[each].pulled and reporter(membership, each) == self.me
        )
        self.orphans = orphans(membership, self.me, served)
        unheld = {h.key for h in membership.holdings if h.owner not in alive}
        self._unheld_since = {key: self._unheld_since.get(key, now) for key in unheld}
        for holding in membership.holdings:
            if holding.owner != self.me and holding.key not in self._releasing:
                self.lease_lost(holding.key)
        held = frozenset(self.owned) | self._releasing
        moves = decide(self.me, membership, held, self._unheld_since, now, self.timings.grace)
        for key, owned in self.owned.items():
            if key in membership.due:
                owned.worker.check_parked()
            elif not owned.worker.starving:
                owned.worker.wake()
        self._release(moves.release - self._releasing)
        if claim := [key for key in moves.claim if key.subscription in served]:
            claimed = await self._start_workers(await self.store.claim(claim))
            self._log_claims(claimed, membership, alive)
        elif not held and not self.reported and not self.orphans:
            await self.store.close_unused()
        if self.oldest_snapshot().total_seconds() >= self.timings.old_snapshot:
            self._release([key for key in self.owned if self._needs_renewal(key)], renew=True)

    def _needs_renewal(self, key: CursorKey) -> bool:
        """Return whether a lease should be renewed now. While a snapshot is held, Postgres keeps the former versions of
        a cursor. A lookup by epoch passes those since the last renewal."""
        return self._at_head(self.owned[key].worker) and self.committer.windows(key) >= self.timings.renew_after

    def _log_peers(self, alive: set[str], before: set[str]) -> None:
        for event, peers in (("Relay joined", alive - before), ("Relay left", before - alive)):
            for peer in sorted(peers - {self.me}):
                log.info(event, extra={"id": peer, "relays": len(alive)})

    def _log_claims(self, claimed: Sequence[CursorKey], membership: Membership, alive: set[str]) -> None:
        """Log the acquired partitions, one line per subscription and former owner."""
        former = {each.key: each.owner for each in membership.holdings if each.owner not in alive}
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for key in claimed:
            groups[key.subscription, former.get(key) or ""].append(key.partition)
        for (number, owner), partitions in sorted(groups.items()):
            about = {"subscription": self.subscriptions[number].name, "partitions": sorted(partitions)}
            if owner:
                about["from"] = owner
            log.info("Partitions taken over from a relay that is gone" if owner else "Partitions acquired", extra=about)

    def _served(self) -> set[int]:
        """Return the subscriptions that are not being withdrawn."""
        return self.streams.keys() - self._withdrawing

    def _notice_changes(self, states: Mapping[int, Subscription]) -> None:
        for number in self._served():
            known, current = self.subscriptions[number], states.get(number)
            if current is None or current.partitions != known.partitions or current.generation != known.generation:
                raise LeaseLost(f"subscription {known.name} was deleted or repartitioned: starting a new session")
            self.set_paused(number, current.paused)

    def set_paused(self, number: int, paused: bool) -> None:
        subscription = self.subscriptions[number]
        if paused == subscription.paused:
            return
        log.info("Subscription %s.", "paused" if paused else "resumed", extra={"subscription": subscription.name})
        self.subscriptions[number] = replace(subscription, paused=paused)
        for worker in self.workers(number):
            self.committer.pause(worker.lease.key, paused)
            worker.pause(paused)

    async def _start_workers(self, cursors: Iterable[Cursor]) -> list[CursorKey]:
        """Start workers for acquired cursors and return their keys. Release those that were withdrawn meanwhile."""
        served = self._served()
        withdrawn: list[Lease] = []
        started: list[CursorKey] = []
        reopened: dict[Window, dict[CursorKey, PartitionWorker]] = defaultdict(dict)
        for cursor in cursors:
            key = cursor.lease.key
            if key.subscription not in served:
                withdrawn.append(cursor.lease)
                continue
            paused = self.subscriptions[key.subscription].paused
            worker = PartitionWorker(cursor, self.streams[key.subscription], self.store, self)
            worker.pause(paused)
            self.owned[key] = _Owned(worker, self._group.create_task(self._run(worker)))
            if cursor.window is not None:
                self.committer.add(cursor.lease, None, paused=paused)
                reopened[cursor.window][key] = worker
            else:
                crashed = cursor.crash_count > 0
                self.committer.add(cursor.lease, cursor.settled_snapshot, paused=paused, cautious=crashed)
            started.append(key)
        if self.owned:
            self.on_checkpoint(Checkpoint.CLAIMED)
        for window, members in reopened.items():
            self.read(WindowFeeder(self.store, window, members, self, self.on_checkpoint))
        if withdrawn:
            await self.store.release(withdrawn)
        return started

    async def _run(self, worker: PartitionWorker) -> None:
        try:
            await worker.run()
        finally:
            self.totals.add(worker.stream.name, worker.counters)
            worker.stream.health.released(worker.lease.key.partition)
            worker.counters.delivered = worker.counters.refused = 0

    def lease_left(self) -> float:
        return self._lease_until - self.clock()

    def _release(self, keys: Iterable[CursorKey], *, keep: bool = False, renew: bool = False) -> None:
        """Release partitions with one task per subscription, so that a hanging sink does not delay other releases."""
        groups: dict[int, list[CursorKey]] = defaultdict(list)
        for key in keys:
            groups[key.subscription].append(key)
        for number, partitions in groups.items():
            retirement = self._group.create_task(self._release_group(partitions, keep=keep, renew=renew))
            self._retirements[retirement] = number
            retirement.add_done_callback(self._retirements.pop)

    async def _released(self, number: int | None = None) -> None:
        """Wait until pending releases are complete, of one subscription or of all."""
        while pending := [task for task, each in self._retirements.items() if number in (None, each)]:
            await asyncio.wait(pending)

    async def _release_group(self, keys: Iterable[CursorKey], *, keep: bool, renew: bool) -> None:
        """Finish the batches in flight, settle, and release the leases or renew them."""
        releasing = {key: self.owned[key] for key in keys if key in self.owned and key not in self._releasing}
        if not releasing:
            return
        self._releasing |= releasing.keys()
        for owned in releasing.values():
            owned.worker.stop()
        tasks = [owned.task for owned in releasing.values()]
        _, unfinished = await asyncio.wait(tasks, timeout=self.timings.drain_within)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self.committer.settled()
        for key, owned in releasing.items():
            if self.owned.get(key) is owned:
                self._forget(key)
        leases = [owned.worker.lease for owned in releasing.values()]
        if renew and not self._stop.is_set():
            await self._start_workers(await self.store.renew(leases))
        elif not keep:
            await self.store.release(leases)
        self._releasing -= releasing.keys()
        self.on_checkpoint(Checkpoint.RELEASED)

    def lease_lost(self, key: CursorKey) -> None:
        owned = self.owned.get(key)
        if owned is not None:
            log.warning("Partition was taken over by another relay", extra={"partition": key.partition})
            owned.worker.stop()  # the cancellation takes effect later, and results may arrive before
            owned.task.cancel()
            self._forget(key)

    def _forget(self, key: CursorKey) -> None:
        self.owned.pop(key, None)
        self.committer.remove(key)
        for reader in self._readers:
            reader.members.pop(key, None)

    def window_opened(self, opened: Opened) -> None:
        candidates = ((lease, self.owned.get(lease.key)) for lease in opened.members)
        workers = {
            lease.key: owned.worker for lease, owned in candidates if owned is not None and owned.worker.lease == lease
        }
        if opened.events is None:
            self.read(WindowFeeder(self.store, opened.window, workers, self, self.on_checkpoint))
            return
        for key, worker in workers.items():
            events = opened.events[key]
            worker.offer(opened.window, events, events[-1].id, last=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._group.create_task(work)

    def read(self, reader: WindowFeeder) -> None:
        self._readers.add(reader)
        self._group.create_task(reader.run()).add_done_callback(lambda _: self._readers.discard(reader))

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.timings.probe_every)
            for number in {key.subscription for key in self.owned} | self.reported | self.orphans.keys():
                subscription, lag = self.subscriptions.get(number), self.lags[number]
                idle = number not in self.reported and number not in self.orphans and self.caught_up(number)
                intervals = _IDLE_LAG_EVERY if idle else 0
                if subscription is not None and self.clock() - lag.queried_at >= intervals * self.timings.probe_every:
                    await lag.query(self.store, subscription, self.clock)

    def caught_up(self, number: int) -> bool:
        """Return whether all events of this relay's partitions found by the last poll are settled."""
        return all(self._at_head(worker) for worker in self.workers(number))

    def _at_head(self, worker: PartitionWorker) -> bool:
        return self.committer.at_head(worker.lease.key) and worker.pending == 0


def _primary_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Choose the error for the caller, a ``MailboatError`` if there is one. Log each other error once."""
    found = {repr(error): error for error in _leaves(errors)}  # several tasks may fail for the same reason
    chosen = min(found.values(), key=lambda error: not isinstance(error, MailboatError))
    for error in (each for each in found.values() if each is not chosen):
        expected = isinstance(error, MailboatError)
        text = error if expected else type(error).__name__
        log.error("Another task of the session failed: %s", text, exc_info=None if expected else error)
    return chosen


def _leaves(error: BaseException) -> list[BaseException]:
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [error]
