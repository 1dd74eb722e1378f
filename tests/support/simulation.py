"""Production relays on an outbox and sinks in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random

from mailboat.cloudevents import MessageEncoder
from mailboat.delivery.backoff import Backoff
from mailboat.delivery.counters import Totals
from mailboat.delivery.poll_interval import WakeSettings
from mailboat.delivery.stream import CheckpointHook, Stream, StreamSettings, ignore_checkpoint
from mailboat.errors import DatabaseUnavailable, LeaseLost
from mailboat.model import Message, OutboxEvent
from mailboat.runtime.session import RelaySession
from mailboat.runtime.timings import Timings
from mailboat.store.settings import ReadLimits, RelayIdentity, StoreSettings
from mailboat.testing.memory_sink import MemorySink
from mailboat_spec import EventSubscription, Format, full_name
from support.ledger import sequence_of
from support.manifests import declared
from support.memory_outbox import MemoryOutbox, MemoryStore
from support.virtual_time import now, runner_loop, until

BACKOFF = Backoff(initial=1.0, factor=2.0, ceiling=8.0, jitter=0.2)
TIMINGS = Timings(beat_every=0.5, lease_ttl=5.0, overdue_after=1.0, grace=3.0)
DEAD_TOPIC = "orders.dead"


def settings(**changes: object) -> StreamSettings:
    """Return settings with three attempts, dead letters and batches of four."""
    return replace(StreamSettings(4, 1.0, 3, BACKOFF, dead_letters=True), **changes)  # type: ignore[arg-type]


def subscription(name: str = "orders", *, partitions: int = 1, **spec: object) -> EventSubscription:
    return declared(name, partitions=partitions, **spec)


@dataclass
class RunningRelay:
    """Process of a relay."""

    name: str
    task: asyncio.Task[None]
    stop: asyncio.Event
    session: RelaySession | None = None
    store: MemoryStore | None = None


@dataclass
class Fleet:
    """An outbox, a sink per subscription, and the relays between them."""

    declared: Sequence[EventSubscription] = field(default_factory=lambda: [subscription()])
    streams: StreamSettings = field(default_factory=settings)
    timings: Timings = TIMINGS
    wake: WakeSettings = field(default_factory=WakeSettings)
    limits: ReadLimits = field(default_factory=ReadLimits)
    dead_topic: bool = False
    on_checkpoint: CheckpointHook = ignore_checkpoint
    oldest_snapshot: timedelta = timedelta()
    random: Random = field(default_factory=lambda: Random(1))
    new_sink: Callable[[], MemorySink] = MemorySink
    outbox: MemoryOutbox = field(init=False)
    sinks: dict[str, MemorySink] = field(init=False)
    relays: dict[str, RunningRelay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outbox = MemoryOutbox(now)
        self.sinks = {full_name(declared): self.new_sink() for declared in self.declared}

    @property
    def sink(self) -> MemorySink:
        (sink,) = self.sinks.values()
        return sink

    # -- relays ------------------------------------------------------------------------------------------------------

    def start(self, name: str = "relay") -> RunningRelay:
        """Start a relay. If it still runs at the end of the test, it is stopped, like by SIGTERM."""
        runner_loop().at_end.append(self._stop_all)
        stop = asyncio.Event()
        relay = RunningRelay(name, asyncio.ensure_future(self._life(name, stop)), stop)
        self.relays[name] = relay
        return relay

    async def started(self, name: str = "relay") -> RunningRelay:
        """Start a relay and wait until it owns a partition."""
        relay = self.start(name)
        await until(lambda: relay.session is not None and relay.session.owned, "ownership")
        return relay

    async def _life(self, name: str, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self._session(name, stop)
            except (DatabaseUnavailable, LeaseLost):
                await asyncio.sleep(0.3)

    async def _session(self, name: str, stop: asyncio.Event) -> None:
        identity = RelayIdentity(name, f"{name}-{self.outbox.number('incarnation')}")
        timings = self.timings
        known = StoreSettings(limits=self.limits, lease_ttl=timings.lease_ttl, overdue_after=timings.overdue_after)
        store = MemoryStore(self.outbox, identity, known)
        orderly = False
        try:
            subscriptions = await store.declare(self.declared)
            await store.join()
            streams = {number: self._stream(number, found.name) for number, found in subscriptions.items()}
            clock = asyncio.get_running_loop().time
            session = RelaySession(
                store,
                name,
                streams,
                subscriptions,
                self.wake,
                timings,
                Totals(),
                clock,
                self.on_checkpoint,
                lambda: self.oldest_snapshot,
            )
            self.relays[name].session, self.relays[name].store = session, store
            await session.run(stop)
            orderly = True
        finally:
            self.relays[name].session = None
            await store.close(leave=orderly)

    def _stream(self, number: int, name: str) -> Stream:
        sink = self.sinks[name]
        encoder = MessageEncoder(Format.RAW, source="test", header_prefix=sink.traits.header_prefix)
        return Stream(
            number,
            name,
            1,
            sink,
            encoder,
            self.streams,
            dead_letter_topic=DEAD_TOPIC if self.dead_topic else None,
            clock=asyncio.get_running_loop().time,
            random=self.random,
            on_checkpoint=self.on_checkpoint,
        )

    async def stop(self, name: str = "relay") -> None:
        """Stop a relay, like SIGTERM."""
        relay = self.relays[name]
        relay.stop.set()
        await relay.task
        del self.relays[name]

    async def _stop_all(self) -> None:
        for name in list(self.relays):
            await self.stop(name)

    async def kill(self, name: str = "relay") -> None:
        """End a relay, like SIGKILL: no settlement, no release."""
        relay = self.relays[name]
        relay.task.cancel()
        with suppress(asyncio.CancelledError):
            await relay.task
        del self.relays[name]

    async def end(self) -> None:
        for name in list(self.relays):
            await self.kill(name)

    # -- writers -----------------------------------------------------------------------------------------------------

    def write(self, *keys: str | None, payload: bytes | None = b"{}") -> list[OutboxEvent]:
        """Commit a transaction with an event per key."""
        transaction = self.outbox.begin()
        written = [transaction.insert("order.placed", key=key, payload=payload) for key in keys]
        transaction.commit()
        return written

    # -- results -----------------------------------------------------------------------------------------------------

    def arrived(self, name: str = "shop/orders") -> list[str]:
        """Return the ids of arrived events in order, without dead letters."""
        return [message.event_id for message in self.sinks[name].arrived if message.topic is None]

    async def all_settled(self, timeout: float = 120.0) -> None:
        """Wait until every committed event is delivered, blocked or dead, and every window is closed."""
        await until(self._settled, "all events to be settled", timeout)

    def _settled(self) -> bool:
        snapshot = self.outbox.snapshot()
        closed = all(
            cursor.window_snapshot is None and not self.outbox.between(cursor.settled_snapshot, str(snapshot))
            for cursor in self.outbox.cursors.values()
        )
        parked = self.outbox.parked.values()
        held_up = {(row.cursor, row.event.key) for row in parked if row.blocked}
        return bool(self.outbox.cursors) and closed and all((row.cursor, row.event.key) in held_up for row in parked)


def sequence_number(message: Message) -> int:
    return sequence_of(message.headers)[0]


def attempt_number(message: Message) -> int:
    return sequence_of(message.headers)[-1]


def by_event(messages: Sequence[Message]) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        found[message.event_id].append(message)
    return found


@dataclass
class Refusals:
    """Predicate for a sink that refuses each chosen event a number of times."""

    times: Counter[str] = field(default_factory=Counter)
    given: Counter[str] = field(default_factory=Counter)

    def __call__(self, message: Message) -> bool:
        if message.topic is not None or self.times[message.event_id] <= 0:
            return False
        self.times[message.event_id] -= 1
        self.given[message.event_id] += 1
        return True


def refusing(fleet: Fleet, tells_which: bool = True, **times: int) -> Refusals:
    """Let the fleet's sink refuse these events a number of times."""
    refusals = Refusals(Counter(times))
    fleet.sink.refuse(refusals, tells_which=tells_which)
    return refusals


def always(event_id: str) -> dict[str, int]:
    """Return arguments for ``refusing(fleet, **always("e-7"))``."""
    return {event_id: 1000}
