"""Kills, stops and replacements of Pub/Sub consumers: no event is lost and each key keeps its order (C1, C2, C9)."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mailboat.consumer.broker.interfaces import BrokerPoint
from mailboat_devservers.redis_server import RedisServer
from support.consumer_processes import FORKS, ended
from support.ledger import payload
from support.ordered_pubsub import OrderedPubSub
from support.pubsub_consumer_main import consume
from support.wait import wait_until

KEYS = 20


class Storm:
    """A subscription, the processes of its consumers, and their effects. `close` kills every process."""

    def __init__(self, service: OrderedPubSub, orders: dict[str, Any]) -> None:
        self.service = service
        self._orders = {"host": service.host, **orders}
        self._effects = Path(orders["effects"])
        self._published: Counter[str] = Counter()
        self.running: list[Any] = []

    def start(self, **orders: Any) -> Any:
        self.running.append(FORKS.Process(target=consume, args=({**self._orders, **orders},)))
        self.running[-1].start()
        return self.running[-1]

    def publish(self, count: int) -> None:
        for _ in range(count):
            key = f"key-{self._published.total() % KEYS}"
            self._published[key] += 1
            self.service.publish(key, payload(key, self._published[key]), **{"ce-type": "x"})

    def effects(self) -> list[tuple[str, int]]:
        lines = self._effects.read_text().splitlines() if self._effects.exists() else []
        return [(effect["key"], effect["number"]) for effect in map(json.loads, lines)]

    def finish(self, timeout: float = 120) -> str:
        """Wait until all events are acknowledged, stop the consumers, check the effects, and return a summary."""
        wait_until(lambda: not self.service.unacknowledged, timeout, what="everything to be handled")
        alive = [process for process in self.running if process.is_alive()]
        wait_until(lambda: self.service.streams >= len(alive), what="consumers to have started")
        for process in alive:
            process.terminate()
        assert [ended(process) for process in alive] == [0] * len(alive)
        effects = self.effects()
        first = list(dict.fromkeys(effects))
        assert Counter(key for key, _ in first) == self._published, "effects are lost"
        last: dict[str, int] = {}
        for key, number in first:
            assert number == last.get(key, 0) + 1, f"{key}: {number} came after {last.get(key, 0)}"
            last[key] = number
        kinds = Counter(process.exitcode for process in self.running)
        return (
            f"{len(first)} events, {len(effects) - len(first)} twice, {kinds[-signal.SIGKILL]} kills, {kinds[0]} stops,"
            f" {self.service.redelivered} redelivered: 0 lost, 0 out of order"
        )

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.join()


@pytest.fixture
def storm(valkey: RedisServer, tmp_path: Path, unique_name: Callable[[str], str]) -> Iterator[Storm]:
    service = OrderedPubSub()
    orders = {"redis": valkey.url, "consumer": unique_name("billing"), "effects": str(tmp_path / "effects")}
    orders["log"] = str(tmp_path / "log")
    storm = Storm(service, orders)
    yield storm
    storm.close()
    service.close()


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.verify)])
def test_three_consumers_are_killed_stopped_and_replaced(
    storm: Storm, seconds: int, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(seconds)
    alive = [storm.start() for _ in range(3)]
    wait_until(lambda: storm.service.streams == 3, what="three consumers")
    deadline = time.monotonic() + seconds
    for end in itertools.cycle([signal.SIGKILL, signal.SIGTERM]):
        storm.publish(100)
        handled = len(storm.effects())
        wait_until(lambda: len(storm.effects()) >= handled + 20, what="consumers to handle events")  # noqa: B023
        time.sleep(chance.random() * 0.1)  # part of the load, not a wait for a condition
        os.kill(alive.pop(chance.randrange(3)).pid, end)
        alive.append(storm.start())
        if time.monotonic() > deadline and end is signal.SIGTERM:
            break
    found = storm.finish(240)
    record_property("storm", found)


@pytest.mark.verify
@pytest.mark.parametrize("point", [point for point in BrokerPoint if "dead" not in point.value])
def test_a_consumer_is_killed_at_every_point(storm: Storm, point: BrokerPoint) -> None:
    for number in range(3):
        victim = storm.start(die_at=point.value, passage=1 + number)
        storm.publish(100)
        assert ended(victim) == -signal.SIGKILL
    storm.start()
    storm.finish()
