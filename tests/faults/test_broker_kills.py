"""Kills of Kafka consumers around their handlers: no event is lost and no order breaks (C1 to C5)."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mailboat.consumer.broker.interfaces import BrokerPoint
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.redis_server import RedisServer
from support.consumer_processes import ended
from support.kafka_consumers import HANDLERS, Consumers
from support.markdown import rows
from support.wait import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "idempotency.md"
STORES = ("none", "redis", "inbox")
"""Columns of the table in docs/idempotency.md, in order."""
EFFECT = "effect"
POINTS = (*(point.value for point in BrokerPoint), EFFECT)
IN_THE_GATE = {
    ("redis", BrokerPoint.CLAIMED.value), ("redis", EFFECT), ("redis", BrokerPoint.MARKED_DONE.value),
    ("redis", BrokerPoint.DEAD_LETTER_WRITTEN.value), ("inbox", EFFECT), ("inbox", BrokerPoint.HANDLED.value),
}  # fmt: skip
SAME_POD = {"instance": "pod-1"}  # the next process takes over the claims of its instance at once


def documented() -> dict[tuple[str, str], list[int]]:
    """Return the table of docs/idempotency.md: attempts with an effect or a dead letter, by store and point."""
    return {
        (store, cells[0].strip("`")): [int(attempt) for attempt in cell.split(",")]
        for cells in rows(PAGE.read_text(), "### Killed at a point")
        for store, cell in zip(STORES, cells[2:], strict=True)
    }


def test_the_page_has_all_points_and_stores() -> None:
    assert set(documented()) == {(store, point) for store in STORES for point in POINTS}


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.verify)])
@pytest.mark.parametrize(
    ("consumers", "point"),
    [
        pytest.param(store, point, marks=() if (store, point) in IN_THE_GATE else pytest.mark.verify)
        for store in STORES
        for point in POINTS
    ],
    indirect=["consumers"],
)
def test_killed_at_a_point_the_outcome_is_as_documented(consumers: Consumers, point: str, times: int) -> None:
    """Kill each process at the point with one new event, after it has handled the events of its predecessor."""
    keys = [f"victim-{number}" for number in range(times)]
    for key in keys:
        victim = consumers.start(**SAME_POD, fails=False, die_at=point, armed_by=key)
        consumers.settle(what="what the last process left")
        consumers.feed.send([key], event_type="refused" if "dead" in point else "x")
        assert ended(victim) == -signal.SIGKILL
    last = consumers.start(**SAME_POD)
    consumers.settle()
    consumers.stop(last)
    found: dict[str, list[int]] = {key: [] for key in keys}
    for (key, _), attempt in consumers.effects():
        found[key].append(attempt)
    for (key, _), attempt, _ in consumers.letters():
        found[key].append(attempt)
    assert found == dict.fromkeys(keys, documented()[consumers.orders["store"], point])


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", BrokerPoint)
def test_killed_at_a_point_beside_other_events(consumers: Consumers, point: BrokerPoint) -> None:
    """Send events until the process has passed the point often enough. One batch or commit may contain many events."""
    times, bad, feed = 5, itertools.count(), consumers.feed
    for n in range(times):
        victim = consumers.start(**SAME_POD, die_at=point.value, passage=1 + n % 3)

        def dies(victim: Any = victim) -> bool:
            feed.send(f"key-{number % 5}" for number in range(50))
            feed.send([f"bad-{next(bad)}"], event_type="refused")
            return ended(victim, timeout=1) is not None

        wait_until(dies, timeout=180, what=f"the process to pass {point.value}")
        assert victim.exitcode == -signal.SIGKILL
    last = consumers.start(**SAME_POD)
    consumers.settle(timeout=300)
    consumers.stop(last)
    consumers.check(most_twice=times * HANDLERS)
    assert {key for (key, _), *_ in consumers.letters()} == {f"bad-{number}" for number in range(next(bad))}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("consumers", "kills"),
    [
        ("inbox", 3),
        *(pytest.param(store, 30, marks=pytest.mark.verify) for store in ("none", "bare", "redis", "inbox")),
    ],
    indirect=["consumers"],
)
def test_killed_at_random_around_the_handler(
    consumers: Consumers, kills: int, record_property: Callable[[str, Any], None]
) -> None:
    """Bare SET NX loses events. The inbox neither loses nor repeats any. The other stores repeat some."""
    chance, store = random.Random(4711), consumers.orders["store"]
    orders: dict[str, Any] = {**SAME_POD, "fails": False, "dawdle": 0.01}
    for _ in range(kills):
        victim = consumers.start(**orders)
        consumers.send_and_wait([f"key-{chance.randrange(50)}" for _ in range(80)], effects=chance.randrange(1, 60))
        time.sleep(chance.uniform(0, 0.02))  # part of the load, not a wait for a condition
        victim.kill()
        assert ended(victim) == -signal.SIGKILL
    last = consumers.start(**orders)
    consumers.settle(timeout=300)
    consumers.stop(last)
    lost, twice = len(consumers.lost()), consumers.twice()
    record_property(
        "contrast", f"{store}: {kills} kills, {len(consumers.feed.sent)} events, {lost} lost, {twice} twice"
    )
    match store:
        case "none":
            assert not lost
            assert twice > 0
        case "bare":
            assert lost > 0
        case "redis":
            consumers.check(most_twice=kills * HANDLERS)
        case "inbox":
            consumers.check(most_twice=0)


@pytest.mark.parametrize("consumers", ["redis", pytest.param("bare", marks=pytest.mark.verify)], indirect=True)
def test_a_lost_reply_of_the_store(
    consumers: Consumers, valkey: RedisServer, proxy_factory: Callable[[int], Proxy]
) -> None:
    """Bare SET NX loses an event without any kill: the client repeats the command, and the key already exists."""
    proxy = proxy_factory(valkey.port)
    process = consumers.start(redis=f"redis://{proxy.address}")
    consumers.feed.send(["first"])
    consumers.settle(what="the first event")
    proxy.lose_reply()
    consumers.feed.send(["second"])
    consumers.settle()
    consumers.stop(process)
    expected = [(("first", 1), 1), (("second", 1), 1)]
    assert consumers.effects() == (expected if consumers.orders["store"] == "redis" else expected[:1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("consumers", ["classic", pytest.param("KIP-848", marks=pytest.mark.verify)], indirect=True)
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.verify)])
def test_consumers_are_killed_stopped_and_replaced(
    consumers: Consumers, seconds: int, record_property: Callable[[str, Any], None]
) -> None:
    """Kill, stop and replace consumers on Apache Kafka.

    kfake never removes a member that was killed in a join, so its rebalances never end.
    """
    chance = random.Random(seconds)
    alive = [consumers.start() for _ in range(3)]
    ends: Counter[signal.Signals] = Counter()
    deadline = time.monotonic() + seconds
    for end in itertools.cycle([signal.SIGKILL, signal.SIGTERM]):
        consumers.send_and_wait([f"key-{chance.randrange(300)}" for _ in range(500)], effects=chance.randrange(1, 300))
        victim = alive.pop(chance.randrange(3))
        os.kill(victim.pid, end)
        ends[end] += 1
        alive.append(consumers.start())
        if time.monotonic() > deadline and end is signal.SIGTERM:
            break
    consumers.settle(timeout=300)
    consumers.stop(*alive)
    kills, stops = ends[signal.SIGKILL], ends[signal.SIGTERM]
    found = f"{len(consumers.feed.sent)} events, {kills} SIGKILL, {stops} SIGTERM"
    record_property("storm", f"{found}, {len(consumers.lost())} lost, {consumers.twice()} twice")
    consumers.check(most_twice=kills * HANDLERS)


@pytest.mark.verify
@pytest.mark.parametrize("consumers", ["redis", "inbox"], indirect=True)
def test_an_event_that_kills_the_process_is_given_up(consumers: Consumers) -> None:
    feed = consumers.feed
    feed.send(f"key-{n % 5}" for n in range(20))
    feed.send(["lethal"], event_type="lethal")
    feed.send(f"key-{n % 5}" for n in range(20))
    orders = {"max_attempts": 2, **SAME_POD}
    current = consumers.start(**orders)

    def given_up() -> bool:
        nonlocal current
        if not current.is_alive():
            current = consumers.start(**orders)
        return bool(consumers.letters())

    wait_until(given_up, timeout=120, what="the lethal event to be given up")
    consumers.settle()
    consumers.stop(current)
    assert consumers.letters() == [(("lethal", 1), 2, "ConsumerDied")]
    consumers.check(most_twice=2 * HANDLERS)
