"""Outages of a destination under load: no attempt is counted, no event is lost, and delivery resumes after them.

The outages: connections are refused, connections are accepted without an answer, and the process is suspended. A
subscription with another destination is not affected.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from mailboat.runtime.relay import Relay
from mailboat_devservers.kafka import KafkaServer, start_apache_kafka, start_kfake
from mailboat_devservers.postgres import Database
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.pubsub import PubSubServer
from support.collectors import Collector, KafkaCollector, PubSubCollector
from support.inprocess_relay import STAGED, Load, StagedSink, serving, status_of
from support.ledger import Written, check_delivery
from support.manifests import Manifest, kafka_sink, pubsub_sink
from support.relay_processes import outbox_relay, subscription
from support.wait import await_until

Stage = dict[str, StagedSink]

KEYS = 20
PARTITIONS = 4
BATCH = 100


class Destination:
    """A sink, with calls that make it unavailable and available again."""

    def __init__(
        self, sink: Manifest, collector: Collector, leave: Callable[[], None], come_back: Callable[[], None]
    ) -> None:
        self.sink = sink
        self.collector = collector
        self.leave = leave
        self.come_back = come_back


def _kafka(start: Callable[[Path], KafkaServer], place: Path, how: str) -> Iterator[Destination]:
    with start(place) as broker:
        broker.create_topic("orders", PARTITIONS)
        leave, come_back = (broker.kill, broker.restart) if how == "killed" else (broker.suspend, broker.resume)
        sink = kafka_sink(broker.bootstrap, "orders")
        yield Destination(sink, KafkaCollector(broker.bootstrap, "orders"), leave, come_back)


def _pubsub(server: PubSubServer, topic: str, how: str) -> Iterator[Destination]:
    with Proxy("127.0.0.1", server.port) as proxy:
        leave, come_back = (proxy.stop, proxy.start) if how == "refusing" else (proxy.deafen, proxy.undeafen)
        sink = pubsub_sink(proxy.address, topic)
        yield Destination(sink, PubSubCollector(server.host, topic), leave, come_back)


BROKERS: dict[str, tuple[str, Callable[[Path], KafkaServer]]] = {
    "Kafka": ("kfake", start_kfake),
    "Apache Kafka": ("apache_kafka", functools.partial(start_apache_kafka, to_be_killed=True)),
}


@contextmanager
def _destination(request: pytest.FixtureRequest, kind: str) -> Iterator[Destination]:
    sink, how = kind.split(", ")
    if sink in BROKERS:
        shared, start = BROKERS[sink]
        request.getfixturevalue(shared)  # skips the test if the broker is missing
        yield from _kafka(start, request.getfixturevalue("tmp_path") / "broker", how)
    else:
        topic = request.getfixturevalue("unique_name")("orders")
        yield from _pubsub(request.getfixturevalue("pubsub"), topic, how)


KINDS = ["Kafka, killed", "Kafka, suspended", "Pub/Sub, refusing", "Pub/Sub, deaf"]


@pytest.mark.parametrize("kind", ["Kafka, killed", "Pub/Sub, deaf"])
async def test_a_short_outage(request: pytest.FixtureRequest, outbox: Database, stage: Stage, kind: str) -> None:
    await _outage(request, outbox, stage, kind, seconds=3)


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*KINDS, "Apache Kafka, killed"])
async def test_an_outage_of_half_a_minute(
    request: pytest.FixtureRequest, outbox: Database, stage: Stage, kind: str
) -> None:
    await _outage(request, outbox, stage, kind, seconds=30)


async def _outage(request: pytest.FixtureRequest, outbox: Database, stage: Stage, kind: str, *, seconds: float) -> None:
    committed: dict[str, Written] = {}
    load = Load(outbox.url, KEYS, committed)
    delivery = {"timeout": "2s", "batchSize": BATCH}
    with _destination(request, kind) as destination, destination.collector as collector:
        manifests = (
            outbox_relay(outbox.url),
            subscription("orders", destination.sink, partitions=PARTITIONS, delivery=delivery),
            subscription("others", STAGED, partitions=2),
        )
        async with serving(*manifests) as relay:
            with load.flowing(pause=0.03):
                await await_until(lambda: len(collector.ids) > 10 * KEYS, timeout=60, what="the flow to begin")
                await asyncio.to_thread(destination.leave)
                try:
                    await await_until(
                        lambda: not status_of(relay, "orders").sink_reachable, timeout=20, what="the outage to be told"
                    )
                    async with _flowing_meanwhile(stage["others"], load):
                        before = len(collector.ids)
                        await asyncio.sleep(seconds)
                    assert len(collector.ids) <= before + PARTITIONS * BATCH * 3  # at most the batches in flight
                    _unharmed(outbox)
                    assert status_of(relay, "orders").last_error
                finally:
                    await asyncio.to_thread(destination.come_back)
                arrived = len(collector.ids)
                await await_until(
                    lambda: len(collector.ids) > arrived + KEYS, timeout=60, what="the flow to begin again"
                )
            await _all_of(collector, committed)
            await _settled(relay)
            collector.until_quiet()
    _unharmed(outbox)
    found = check_delivery(committed, (), collector.arrivals, kills=1)
    assert found.duplicates <= PARTITIONS * BATCH * 3
    assert {arrival.attempt for arrival in collector.arrivals} == {1}
    check_delivery(committed, (), stage["others"].arrivals)


def _unharmed(outbox: Database) -> None:
    """Guarantee G4: no attempt was counted, and no event is parked or dead."""
    assert outbox.execute("select count(*) from mailboat.parked") == [(0,)]
    assert outbox.execute("select count(*) from mailboat.dead_letters") == [(0,)]


async def _all_of(collector: Collector, committed: dict[str, Written]) -> None:
    await await_until(
        lambda: len(collector.ids) >= len(committed), timeout=60, what=f"{len(committed)} events to arrive"
    )


async def _settled(relay: Relay) -> None:
    await await_until(
        lambda: all(status_of(relay, name).lag == 0 for name in ("orders", "others")),
        timeout=60,
        what="everything to be settled",
    )
    assert status_of(relay, "orders").sink_reachable


@asynccontextmanager
async def _flowing_meanwhile(sink: StagedSink, load: Load) -> AsyncIterator[None]:
    """Check that the other subscription gets the events written during the block, before the outage ends."""
    before, rounds = len(sink.arrived), load.rounds
    yield
    written = (load.rounds - rounds) * KEYS
    assert written > 0
    await await_until(lambda: len(sink.arrived) - before >= written, timeout=30, what="what the others were sent")


async def test_a_sink_that_can_not_be_closed_keeps_no_relay_from_ending(
    outbox: Database, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def close(sink: StagedSink) -> None:
        closed.append(next(name for name, each in stage.items() if each is sink))
        raise RuntimeError("somebody else's mistake")

    async with serving(outbox_relay(outbox.url), *(subscription(name, STAGED) for name in ("orders", "others"))):
        await await_until(lambda: len(stage) == 2, what="both sinks")
        monkeypatch.setattr(StagedSink, "close", close)
    assert sorted(closed) == ["orders", "others"]
