"""Racing writers, and relays that are killed about once a second: no event is lost, invented or out of order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import TopicFactory
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from mailboat_devservers.pubsub import PubSubServer
from support.collectors import Collector, KafkaCollector, PubSubCollector
from support.lease_watch import Watch
from support.ledger import Delivered, check_delivery
from support.manifests import kafka_sink, pubsub_sink
from support.racing_writers import Racers
from support.relay_processes import SWIFT, WALKING, Fleet, outbox_relay, subscription
from support.wait import wait_until

RELAYS = 3
LEAST_KILLS = 0.6
"""Per second. On a busy machine the race continues until this rate times its length is reached."""
REPEATED = 0.5
"""Seconds of deliveries that may arrive twice for each kill, because they were published and not settled."""


class Race:
    """Three relays. About once a second one is killed and replaced by a relay with the same id or a new one."""

    def __init__(self, fleet: Fleet, racers: Racers, watch: Watch, chance: random.Random) -> None:
        self.seconds = 0.0
        """Length of the race."""
        self._fleet = fleet
        self._racers = racers
        self._watch = watch
        self._chance = chance

    def run(self, seconds: float) -> None:
        fleet, chance = self._fleet, self._chance
        fleet.start_connected(RELAYS)
        wait_until(lambda: len(self._watch.owners) == RELAYS, 60, "each relay to own something")
        began = time.monotonic()
        while time.monotonic() - began < seconds or fleet.kills < LEAST_KILLS * seconds:
            self._racers.wait(chance.uniform(0.5, 1.5))
            victim = chance.choice(wait_until(lambda: fleet.working, 60, "a relay that works"))
            fleet.kill(victim)
            fleet.start(victim.relay if chance.random() < 0.5 else None)
        self.seconds = time.monotonic() - began
        wait_until(
            lambda: self._watch.owners == set(fleet.relays), 60, "each relay to own partitions after the last kill"
        )

    def check(self, *collectors: Collector) -> list[Delivered]:
        fleet, watch = self._fleet, self._watch
        ledger = self._racers.finish()
        finished = time.monotonic()
        for collector in collectors:
            collector.until_all(ledger.committed, timeout=90)
        findings = []
        for collector in collectors:
            collector.until_quiet()
            found = check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals, kills=fleet.kills)
            behind = max(collector.ids.values()) - finished
            print(f"{collector.name}: {found}; caught up after {behind:.1f} s")  # noqa: T201 - shown with -s
            findings.append(found)
        assert len(fleet.working) == RELAYS
        assert watch.reigns, "no partition changed its owner"
        shown = f"{len(watch.small)} small windows, {len(watch.large)} large, {len(watch.reigns)} changes of owner"
        print(f"{fleet.kills} kills in {self.seconds:.0f} s; {shown}")  # noqa: T201 - shown with -s
        return findings


def test_a_short_race_against_kfake(
    outbox: Database, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake)
    manifests = [outbox_relay(outbox.url), subscription("kfake", kafka_sink(kfake.bootstrap, topic))]
    with (
        Fleet(tmp_path / "fleet", manifests, timings=SWIFT, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, topic) as collector,
        Racers(outbox.url, seed=7, dawdle=0.05) as racers,
        Watch(outbox.url) as watch,
    ):
        race = Race(fleet, racers, watch, random.Random(7))
        race.run(10)
        race.check(collector)


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_minute_of_kills_against_three_destinations(
    each_outbox: Database,
    kfake: KafkaServer,
    apache_kafka: KafkaServer,
    pubsub: PubSubServer,
    kafka_topic: TopicFactory,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    light, heavy, google = kafka_topic(kfake), kafka_topic(apache_kafka), unique_name("race")
    manifests = [
        outbox_relay(each_outbox.url),
        subscription("kfake", kafka_sink(kfake.bootstrap, light)),
        subscription("apache", kafka_sink(apache_kafka.bootstrap, heavy), partitions=4),
        subscription("google", pubsub_sink(pubsub.host, google), partitions=3),
    ]
    with (
        Fleet(tmp_path / "fleet", manifests, timings=SWIFT, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, light) as from_kfake,
        KafkaCollector(apache_kafka.bootstrap, heavy) as from_apache,
        PubSubCollector(pubsub.host, google) as from_google,
        Racers(each_outbox.url, writers=10, keys=60, seed=11, dawdle=0.3) as racers,
        Watch(each_outbox.url) as watch,
    ):
        race = Race(fleet, racers, watch, random.Random(11))
        race.run(60)
        for found in race.check(from_kfake, from_apache, from_google):
            # A kill repeats the deliveries of a moment. A relay that is catching up also repeats the windows that it
            # had read.
            per_kill = REPEATED * found.committed / race.seconds + RELAYS * WALKING.rows
            assert found.duplicates <= fleet.kills * per_kill, found
        assert watch.small, "the race had no small window"
        assert watch.large, "the race had no large window"
