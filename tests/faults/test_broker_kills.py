"""Consumers of a Kafka topic are killed around their handlers: nothing is lost, no order breaks (C1, C2, C4, C5)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mailboat.consumer.broker.protocol import BrokerPoint
from mailboat_harbor.kafka import KafkaServer
from mailboat_harbor.redis_server import RedisServer
from support.kafka_feed import Feed, committed
from support.wait import wait_until

TESTS = Path(__file__).parents[1]
PARTITIONS = 6


@dataclass
class Consumers:
    """Processes of one consumer group. Leaves none behind."""

    server: KafkaServer
    orders: dict[str, Any]
    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, **orders: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "support.broker_consumer_main", json.dumps({**self.orders, **orders})]
        with (self.folder / "log").open("ab") as log:
            env = {**os.environ, "PYTHONPATH": str(TESTS)}
            self.running.append(subprocess.Popen(command, env=env, stderr=log))
        return self.running[-1]

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def effects(self) -> list[tuple[str, int]]:
        return [(line["key"], line["number"]) for line in self.lines("effects")]

    def is_settled(self, feed: Feed) -> bool:
        done = committed(self.server, feed.topic, self.orders["group"], PARTITIONS)
        return sum(done.values()) == len(feed.sent)

    def stop(self, *processes: subprocess.Popen[bytes]) -> None:
        for each in processes:
            wait_until(lambda: f" {each.pid} root started" in (self.folder / "log").read_text(), what="its start")  # noqa: B023
            each.terminate()
        assert [each.wait(timeout=60) for each in processes] == [0] * len(processes)


@pytest.fixture
def consumers(
    request: pytest.FixtureRequest, kafka_topic: Any, unique_name: Callable[[str], str], tmp_path: Path
) -> Iterator[Consumers]:
    """On kfake by default; parametrized indirectly with a group protocol, ``consumer`` runs on Apache Kafka."""
    protocol = getattr(request, "param", "classic")
    server: KafkaServer = request.getfixturevalue("apache_kafka" if protocol == "consumer" else "kfake")
    valkey: RedisServer = request.getfixturevalue("valkey")
    orders = {
        "bootstrap": server.bootstrap, "topic": kafka_topic(server, partitions=PARTITIONS), "protocol": protocol,
        "group": unique_name("group"), "redis": valkey.url, "effects": str(tmp_path / "effects"),
        "dead": str(tmp_path / "dead"),
    }  # fmt: skip
    made = Consumers(server, orders, tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.wait()


def check(consumers: Consumers, feed: Feed, *, most_twice: int, dead: int = 0) -> None:
    effects = consumers.effects()
    lost = set(feed.sent) - set(effects) - {(line["key"], line["number"]) for line in consumers.lines("dead")}
    assert not lost, f"{len(lost)} events are lost"
    seen: dict[str, int] = {}
    for key, number in effects:
        assert number <= seen.get(key, 0) + 1 + dead, f"key {key}: {number} came after {seen.get(key)}"
        seen[key] = max(number, seen.get(key, 0))
    again: dict[str, int] = {}
    for key, number in effects:  # a repeated effect is the last one of its key, never an earlier one
        assert number >= again.get(key, 0), f"key {key}: {number} was repeated after {again[key]}"
        again[key] = number
    twice = sum(count - 1 for count in Counter(effects).values())
    assert twice <= most_twice, f"{twice} effects happened again"


IN_THE_GATE = (BrokerPoint.CLAIMED, BrokerPoint.HANDLED, BrokerPoint.DEAD_LETTER_WRITTEN)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.verify)])
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(each, marks=() if each in IN_THE_GATE else pytest.mark.verify, id=each.value)
        for each in BrokerPoint
    ],
)
def test_a_consumer_is_killed_at_every_point(consumers: Consumers, point: BrokerPoint, times: int) -> None:
    feed = Feed(consumers.server, consumers.orders["topic"])
    orders = {"instance": "pod-1"}  # the same pod: its claims are taken over at once
    for n in range(times):
        victim = consumers.start(**orders, die_at=point.value, passage=1 + n % 3)
        feed.send(f"key-{n % 5}" for n in range(50))
        feed.send([f"bad-{n}"], event_type="refused")
        assert victim.wait(timeout=60) == -signal.SIGKILL
    last = consumers.start(**orders)
    wait_until(lambda: consumers.is_settled(feed), what="everything to be handled")
    consumers.stop(last)
    check(consumers, feed, most_twice=times * 8)
    letters = Counter((line["key"], line["reason"]) for line in consumers.lines("dead"))
    assert {key for key, _ in letters} >= {f"bad-{n}" for n in range(times)}


@pytest.mark.parametrize("consumers", ["classic", pytest.param("consumer", marks=pytest.mark.verify)], indirect=True)
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.verify)])
def test_consumers_are_killed_at_random(consumers: Consumers, seconds: int) -> None:
    chance, kills = random.Random(seconds), 0
    feed = Feed(consumers.server, consumers.orders["topic"])
    alive = [consumers.start() for _ in range(3)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(10):
            feed.send(f"key-{chance.randrange(300)}" for _ in range(50))
            time.sleep(0.1)  # part of the load, not a way to wait
        victim = alive.pop(chance.randrange(3))
        if chance.random() < 0.5:
            kills += 1
            victim.kill()
        else:
            victim.terminate()
        alive.append(consumers.start())
    wait_until(lambda: consumers.is_settled(feed), timeout=180, what="everything to be handled")
    consumers.stop(*alive)
    check(consumers, feed, most_twice=kills * 8)


@pytest.mark.verify
def test_an_event_that_kills_the_process_is_given_up(consumers: Consumers) -> None:
    feed = Feed(consumers.server, consumers.orders["topic"])
    feed.send(f"key-{n % 5}" for n in range(20))
    feed.send(["lethal"], event_type="lethal")
    feed.send(f"key-{n % 5}" for n in range(20))
    orders = {"max_attempts": 2, "instance": "pod-1"}
    current = consumers.start(**orders)

    def restarted_until_done() -> bool:
        nonlocal current
        if current.poll() is not None:
            current = consumers.start(**orders)
        return consumers.is_settled(feed)

    wait_until(restarted_until_done, timeout=120, what="the lethal event to be given up")
    consumers.stop(current)
    letters = consumers.lines("dead")
    assert [(line["key"], line["reason"], line["attempts"]) for line in letters] == [("lethal", "ConsumerDied", 2)]
    check(consumers, feed, most_twice=2 * 8)
