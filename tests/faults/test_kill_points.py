"""Kills of a relay at every named point of its cycle, at its first, second and third passage.

Another relay then takes over. No event is lost or out of order, and no event has more attempts than allowed. The first
tests use a sink that takes one batch at a time and refuses some events; the last test uses Kafka, where batches
overlap.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from conftest import TopicFactory
from mailboat import emit
from mailboat.delivery.stream import Checkpoint
from mailboat.store.settings import ReadLimits
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from support import refusing_sink
from support.collectors import KafkaCollector
from support.ledger import Ledger, Written, check_delivery, payload
from support.manifests import kafka_sink
from support.relay_processes import SWIFT, DieAt, Fleet, RelayProcess, outbox_relay, subscription
from support.wait import wait_until

KEYS, MAX_ATTEMPTS, MOST_EVENTS = 5, 3, 400
DEAD_TOPIC = "dead"

TINY = ReadLimits(small_rows=6, rows=8)
ONCE = {Checkpoint.CLAIMED, Checkpoint.RELEASED}
"""A single relay claims once and releases once."""


@pytest.fixture
def outbox(each_outbox: Database) -> Database:
    """Outbox on the newest and on the oldest supported Postgres."""
    return each_outbox


@pytest.fixture
def fleet(outbox: Database, packages: Path, tmp_path: Path) -> Iterator[Fleet]:
    sink = {"custom": {"type": "picky", "config": {"path": str(tmp_path / "arrived")}}}
    delivery = {
        "timeout": "2s",
        "batchSize": 4,
        "maxAttempts": MAX_ATTEMPTS,
        "backoff": {"initial": "10ms", "factor": 1, "max": "20ms"},
        "deadLetter": {"topic": DEAD_TOPIC},
    }
    manifests = [outbox_relay(outbox.url), subscription("picky", sink, partitions=2, delivery=delivery)]
    env = {"PYTHONPATH": str(packages)}
    with Fleet(tmp_path / "fleet", manifests, timings=SWIFT, limits=TINY, env=env) as fleet:
        yield fleet


class Feed:
    """Writer of events with few keys, one transaction per event.

    With ``refused``, the sink refuses some events once before it takes them, and some events always.
    """

    def __init__(self, url: str, *, refused: bool = True) -> None:
        self.ledger = Ledger()
        self.hopeless: set[str] = set()
        self._refused = {11: "2", 17: "always"} if refused else {}
        self._url = url
        self._written = 0

    def write(self, count: int = 1) -> None:
        with psycopg.connect(self._url) as connection:
            for index in range(self._written, min(self._written + count, MOST_EVENTS)):
                key, number = f"key-{index % KEYS}", 1 + index // KEYS
                content = payload(key, number)
                refused = self._refused.get(index % 23)
                headers = {"refused-until": refused} if refused else None
                event_id = str(emit(connection, "killed.at", content, key=key, headers=headers))
                connection.commit()
                if refused == "always":
                    self.hopeless.add(event_id)
                else:
                    self.ledger.commit([Written(event_id, key, number, content)])
        self._written += count


@pytest.fixture
def feed(outbox: Database) -> Feed:
    return Feed(outbox.url)


@pytest.mark.parametrize("point", Checkpoint, ids=lambda point: point.value)
def test_a_relay_killed_at(point: Checkpoint, outbox: Database, feed: Feed, fleet: Fleet, tmp_path: Path) -> None:
    _kill_and_go_on([DieAt(point)], outbox, feed, fleet, tmp_path)


@pytest.mark.verify
@pytest.mark.parametrize("point", [point for point in Checkpoint if point not in ONCE], ids=lambda point: point.value)
def test_relays_killed_one_after_another_at(
    point: Checkpoint, outbox: Database, feed: Feed, fleet: Fleet, tmp_path: Path
) -> None:
    deaths = [DieAt(point, passage) for passage in (3, 2, 1, 1)]
    _kill_and_go_on(deaths, outbox, feed, fleet, tmp_path)


def _kill_and_go_on(deaths: list[DieAt], outbox: Database, feed: Feed, fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "arrived"
    feed.write(60)
    for death in deaths:
        victim = fleet.start("victim", die_at=death)
        if death.point is Checkpoint.RELEASED:
            wait_until(lambda: any(refusing_sink.arrivals(file)), 60, "the first event to arrive")
            os.kill(victim.pid, signal.SIGTERM)

        _until_it_dies(victim, death, feed)
    survivor = fleet.start("survivor")

    def settled() -> bool:
        here = {arrival.event_id for arrival in refusing_sink.arrivals(file)}
        return feed.ledger.committed.keys() <= here and dead_letters(outbox).keys() == feed.hopeless

    wait_until(settled, 60, "all events to arrive, and the hopeless ones to be given up on")
    fleet.stop(survivor)

    found = check_delivery(
        feed.ledger.committed, (), list(refusing_sink.arrivals(file)), kills=fleet.kills, gapless=False
    )
    print(found)  # noqa: T201 - shown with -s
    assert all(attempts == [MAX_ATTEMPTS] for attempts in dead_letters(outbox).values())
    assert {arrival.event_id for arrival in refusing_sink.arrivals(file, DEAD_TOPIC)} == feed.hopeless
    assert outbox.execute("select count(*) from mailboat.parked") == [(0,)]
    assert outbox.execute("select count(*) from mailboat.cursors where not released") == [(0,)]


def _until_it_dies(victim: RelayProcess, death: DieAt, feed: Feed) -> None:
    def died() -> bool:
        feed.write()  # without new events there would be no third window
        return not victim.running

    wait_until(died, 60, f"the relay to die at {death}")
    assert victim.status == -signal.SIGKILL, f"it was to die at {death}.\n{victim.log_tail()}"


def dead_letters(outbox: Database) -> dict[str, list[int]]:
    """Return the attempts of each dead event, one number per row in `mailboat.dead_letters`."""
    dead: dict[str, list[int]] = {}
    for event_id, attempts in outbox.execute("select event_id::text, attempts from mailboat.dead_letters"):
        dead.setdefault(event_id, []).append(attempts)
    return dead


# ---- batches that overlap -------------------------------------------------------------------------------------------

STRETCHED = ReadLimits(small_rows=6, rows=80)
"""Room for many batches: two batches are always in flight."""
OVERLAPPED = [
    DieAt(Checkpoint.BATCH_TAKEN, in_the_air=1),
    DieAt(Checkpoint.HANDED_OVER, in_the_air=2),
    DieAt(Checkpoint.ANSWERED, in_the_air=2),
    DieAt(Checkpoint.SETTLING, answers=2),  # a tick waits for batches in flight, so it settles both
    DieAt(Checkpoint.SETTLED, answers=2),
]


@pytest.mark.verify
@pytest.mark.parametrize("passage", [1, pytest.param(4, marks=pytest.mark.verify)])
@pytest.mark.parametrize("death", OVERLAPPED, ids=lambda death: death.point.value)
def test_a_relay_killed_with_two_batches_on_their_way_at(
    death: DieAt, passage: int, outbox: Database, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake, partitions=2)
    delivery = {"timeout": "5s", "batchSize": 4}
    stream = subscription("kfake", kafka_sink(kfake.bootstrap, topic), partitions=1, delivery=delivery)
    feed = Feed(outbox.url, refused=False)
    feed.write(200)
    with (
        Fleet(tmp_path / "fleet", [outbox_relay(outbox.url), stream], timings=SWIFT, limits=STRETCHED) as fleet,
        KafkaCollector(kfake.bootstrap, topic) as collector,
    ):
        victim = fleet.start("victim", die_at=replace(death, passage=passage))
        _until_it_dies(victim, death, feed)
        survivor = fleet.start("survivor")
        feed.write(60)
        collector.until_all(feed.ledger.committed)
        fleet.stop(survivor)
        collector.until_quiet()
    found = check_delivery(feed.ledger.committed, (), collector.arrivals, kills=fleet.kills)
    print(found)  # noqa: T201 - shown with -s
    assert outbox.execute("select count(*) from mailboat.cursors where not released") == [(0,)]
