"""Writers race, relays are killed every second or so, and nothing is lost, invented or out of order."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import TopicFactory
from faults.collectors import Collector, KafkaCollector, PubSubCollector
from faults.fleet import SWIFT, WALKING, Fleet, kafka_sink, outbox_relay, pubsub_sink, subscription
from faults.ledger import check_delivery
from faults.racing import Racers
from mailboat_harbor.kafka import KafkaServer
from mailboat_harbor.postgres import Database, PostgresServer
from mailboat_harbor.pubsub import PubSubServer
from migrated import migrated_database
from waiting import wait_until


def race(fleet: Fleet, racers: Racers, seconds: float, chance: random.Random) -> None:
    """Three relays, one of them killed every second or so; the next one comes under the same name or a new one."""
    fleet.start_connected(3)
    ending = time.monotonic() + seconds
    while (left := ending - time.monotonic()) > 0:
        racers.wait(min(left, chance.uniform(0.5, 1.5)))
        victim = chance.choice(wait_until(lambda: fleet.working, 30, "a relay that works"))
        fleet.kill(victim)
        fleet.start(victim.relay if chance.random() < 0.5 else None)


def check(racers: Racers, fleet: Fleet, collectors: list[Collector]) -> None:
    ledger = racers.finish()
    finished = time.monotonic()
    for collector in collectors:
        collector.until_all(ledger.committed, timeout=90)
    for collector in collectors:
        collector.until_quiet()
        found = check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals, kills=fleet.kills)
        behind = max(collector.ids.values()) - finished
        print(f"{collector.name}: {found}; caught up after {behind:.1f} s")  # noqa: T201 - shown with -s


@pytest.fixture
def outbox14(postgres14: PostgresServer) -> Iterator[Database]:
    """The same on the oldest supported Postgres."""
    yield from migrated_database(postgres14)


@pytest.mark.parametrize("name", ["outbox", pytest.param("outbox14", marks=pytest.mark.faults)])
def test_a_short_race_against_kfake(
    name: str, request: pytest.FixtureRequest, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    outbox: Database = request.getfixturevalue(name)
    topic = kafka_topic(kfake)
    manifests = [outbox_relay(outbox.url), subscription("kfake", kafka_sink(kfake.bootstrap, topic))]
    with (
        Fleet(tmp_path / "fleet", manifests, timings=SWIFT, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, topic) as collector,
        Racers(outbox.url, seed=7, dawdle=0.05) as racers,
    ):
        race(fleet, racers, 10, random.Random(7))
        check(racers, fleet, [collector])


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_minute_of_kills_against_three_destinations(
    outbox: Database,
    kfake: KafkaServer,
    apache_kafka: KafkaServer,
    pubsub: PubSubServer,
    kafka_topic: TopicFactory,
    tmp_path: Path,
) -> None:
    light, heavy, google = kafka_topic(kfake), kafka_topic(apache_kafka), f"race-{tmp_path.name}"
    manifests = [
        outbox_relay(outbox.url),
        subscription("kfake", kafka_sink(kfake.bootstrap, light)),
        subscription("apache", kafka_sink(apache_kafka.bootstrap, heavy), partitions=4),
        subscription("google", pubsub_sink(pubsub.host, google), partitions=3),
    ]
    with (
        Fleet(tmp_path / "fleet", manifests, timings=SWIFT, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, light) as from_kfake,
        KafkaCollector(apache_kafka.bootstrap, heavy) as from_apache,
        PubSubCollector(pubsub.host, google) as from_google,
        Racers(outbox.url, writers=10, keys=60, seed=11, dawdle=0.3) as racers,
    ):
        race(fleet, racers, 60, random.Random(11))
        check(racers, fleet, [from_kfake, from_apache, from_google])
