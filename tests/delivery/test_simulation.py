"""Whole relays in simulated time, with random writers, outages, refusals and deaths: the guarantees always hold.

The session of a relay runs unchanged on an outbox and a sink in memory. Each seed gives another history, and the same
seed gives the same history. The name of a failed test contains its seed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random

import pytest

from mailboat.delivery.stream import Checkpoint
from mailboat.model import OutboxEvent
from mailboat.sinks.protocol import Traits
from mailboat.store.settings import ReadLimits
from mailboat.testing.memory_sink import MemorySink
from support.ledger import sequence_of
from support.simulation import TIMINGS, Fleet, Refusals, attempt_number, by_event, settings, subscription
from support.virtual_time import in_virtual_time

FAULTS_FOR = 20.0
KEYS = ["a", "b", "c", "d", "e", None]


@dataclass
class History:
    """Record of a simulation, for the checks."""

    committed: list[OutboxEvent]
    refusals: Refusals
    suspects: set[str] = field(default_factory=set)
    """Events in flight when sessions repeatedly failed: their attempt is counted before it is made."""


async def writer(fleet: Fleet, random: Random, locks: dict[str, asyncio.Lock], history: History) -> None:
    """Run transactions of a few events that lock their keys until they end. Some are rolled back."""
    clock = asyncio.get_running_loop().time
    while clock() < FAULTS_FOR:
        await asyncio.sleep(random.expovariate(2.0))
        transaction = fleet.outbox.begin(early=random.random() < 0.5)
        keys = random.sample(KEYS, random.randint(1, 3))
        held = [locks[key] for key in sorted(key for key in keys if key is not None)]
        for lock in held:
            await lock.acquire()
        events = []
        for _ in range(random.randint(1, 4)):
            type = random.choice(["a.x", "b.x"])
            events.append(transaction.insert(type, key=random.choice(keys), payload=b"x" * random.randint(0, 20)))
            await asyncio.sleep(random.choice([0, 0, 0.01, 0.3]))
        if random.random() < 0.15:
            transaction.rollback()
        else:
            for event in events:
                if random.random() < 0.05:
                    history.refusals.times[event.event_id] = random.choice([1, 2, 100])
            transaction.commit()
            history.committed += events
        for lock in held:
            lock.release()


async def trouble(fleet: Fleet, random: Random, history: History) -> None:
    """Cause one fault after another."""
    clock = asyncio.get_running_loop().time
    while clock() < FAULTS_FOR:
        await asyncio.sleep(random.expovariate(0.7))
        match random.randrange(6):
            case 0:
                sink = random.choice(list(fleet.sinks.values()))
                sink.go_away()
                await asyncio.sleep(random.expovariate(0.5))
                sink.come_back()
            case 1:
                name = random.choice(sorted(fleet.relays))
                await fleet.kill(name)
                await asyncio.sleep(random.choice([0.0, 0.5, 4.0]))
                fleet.start(name)
            case 2:
                name = random.choice(sorted(fleet.relays))
                await fleet.stop(name)
                await asyncio.sleep(random.choice([0.0, 1.0]))
                fleet.start(name)
            case 3:
                fleet.outbox.away = "told to be away"
                await asyncio.sleep(random.expovariate(1.0))
                fleet.outbox.away = None
            case 4:
                sink = random.choice(list(fleet.sinks.values()))
                sink.hold_answers()
                await asyncio.sleep(random.expovariate(1.0))
                sink.let_go()
            case 5:  # the database answers so late that leases expire
                fleet.outbox.latency = lambda: random.choice([0.0, 0.01, 6.0])
                await asyncio.sleep(3.0)
                fleet.outbox.latency = lambda: random.uniform(0, 0.005)


def check(fleet: Fleet, history: History) -> None:
    committed = {event.event_id: event for event in history.committed}
    for number, found in fleet.outbox.subscriptions.items():
        name = found.subscription.name
        wanted = {row.event.event_id for row in fleet.outbox.rows if row.wanted_by(found.resource.spec)}
        messages = fleet.sinks[name].arrived
        dead = {row.event.event_id: row for row in fleet.outbox.dead if row.cursor.subscription == number}

        assert {message.event_id for message in messages} <= committed.keys(), "G3: never committed"
        assert wanted - {message.event_id for message in messages} - dead.keys() == set(), (
            "G1: neither delivered nor dead"
        )

        first_arrivals: dict[str | None, list[int]] = {}
        for event_id in dict.fromkeys(message.event_id for message in messages):
            first_arrivals.setdefault(committed[event_id].key, []).append(committed[event_id].id)
        for key, ids in first_arrivals.items():
            assert key is None or ids == sorted(ids), f"G2: key {key} out of order"

        limit = fleet.streams.max_attempts
        assert all(row.attempts <= limit for row in dead.values()), "G4: more attempts than allowed"
        for message in messages:
            refused = history.refusals.given[message.event_id]
            attempt = attempt_number(message)
            assert attempt <= min(refused + 1, limit) or message.event_id in history.suspects, "G4"

        sequences = Counter(committed[event_id].slot % found.subscription.partitions for event_id in wanted)
        for at, cursor in fleet.outbox.cursors.items():
            if at.subscription == number:
                assert cursor.sequence == sequences[at.partition], "G5: settled twice, or not at all"
        for copies in by_event(messages).values():
            stamps = {sequence_of(copy.headers)[:2] for copy in copies}
            assert len(stamps) == 1, "G9: a duplicate with another number"


async def simulate(seed: int) -> tuple[Fleet, History]:
    random = Random(seed)
    stops = random.random() < 0.7
    history = History([], Refusals())

    def on_checkpoint(point: Checkpoint) -> None:
        history.suspects.update(row.event.event_id for row in fleet.outbox.parked.values() if row.suspect)

    def sink() -> MemorySink:
        made = MemorySink(traits=Traits(header_prefix="ce_", stops_behind_failure=stops), delivery_timeout=1.0)
        made.refuse(history.refusals, tells_which=stops)
        return made

    fleet = Fleet(
        declared=[
            subscription("all", partitions=random.choice([1, 2, 3])),
            subscription("some", partitions=random.choice([1, 2]), filter={"eventTypes": ["b.*"]}),
        ],
        streams=settings(batch_size=random.choice([1, 3, 10])),
        limits=random.choice([ReadLimits(), ReadLimits(small_rows=2, rows=2), ReadLimits(bytes=30)]),
        random=random,
        new_sink=sink,
        on_checkpoint=on_checkpoint,
        timings=replace(TIMINGS, renew_after=2),
        oldest_snapshot=timedelta(hours=random.choice([0, 1])),
    )
    locks = {key: asyncio.Lock() for key in KEYS if key is not None}
    for name in ["one", "two", "three"][: random.randint(2, 3)]:
        fleet.start(name)
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(writer(fleet, random, locks, history))
        group.create_task(trouble(fleet, random, history))
    await fleet.all_settled(300.0)
    for name in sorted(fleet.relays):
        await fleet.stop(name)
    return fleet, history


@pytest.mark.parametrize("seed", range(24), ids=lambda seed: f"seed={seed}")
@in_virtual_time
async def test_the_guarantees_hold_in_every_history(seed: int) -> None:
    check(*await simulate(seed))


def test_the_same_seed_gives_the_same_history() -> None:
    histories = []

    @in_virtual_time
    async def record() -> None:
        fleet, _ = await simulate(seed=1)
        histories.append({name: sink.arrived for name, sink in fleet.sinks.items()})

    record()
    record()
    assert histories[0] == histories[1]
