"""A key whose events always fail does not delay other keys. Replay delivers its events in order (C6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from mailboat import Consumer, Event, Kafka, Redis
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from mailboat_devservers.redis_server import RedisServer
from support import admin_actions
from support.kafka_feed import Feed
from support.wait import await_until

EVENTS, KEYS, POISON = 20_000, 1_000, "7"
ATTEMPTS = 3
DELIVERY = {"maxAttempts": ATTEMPTS, "backoff": {"initial": "100ms", "max": "200ms"}}


class Handled:
    """Record of the events that a consumer has handled, in order."""

    def __init__(self, view: Consumer, pause: float = 0) -> None:
        """Start the consumer. ``pause``: seconds that the handler takes for an event of any other key."""
        self._pause = pause
        self.attempts = 0
        """Failed attempts."""
        self.poisoned: list[int] = []
        self.others: dict[str, list[int]] = {}
        self._seen: set[int] = set()
        self.fails = False
        self._stop = asyncio.Event()
        view.on("*")(self._handle)
        self._serving = asyncio.create_task(view.serve(self._stop))

    async def _handle(self, number: int, event: Event) -> None:
        if event.key == POISON:
            if self.fails:
                self.attempts += 1
                raise ValueError("always")
            self.poisoned.append(number)
            return
        if self._pause:
            await asyncio.sleep(self._pause)
        if number not in self._seen:  # if the poison rolls a batch back, its other events are handled again
            self._seen.add(number)
            self.others.setdefault(event.key or "", []).append(number)

    @property
    def count(self) -> int:
        return len(self._seen)

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait until the condition holds and return the seconds since the first event."""
        await await_until(lambda: self.count > 0, what="the first event")
        began = time.perf_counter()
        await await_until(condition, timeout=300, what=what)
        return time.perf_counter() - began

    async def stop(self) -> None:
        self._stop.set()
        await self._serving


@pytest.mark.verify
@pytest.mark.timeout(600)
async def test_the_other_keys_keep_their_rate_and_replay_restores_the_order(
    outbox: Database, record_property: Callable[[str, object], None]
) -> None:
    outbox.execute(
        "insert into mailboat.outbox (event_type, key, payload)"
        f" select 'x', n % {KEYS}, convert_to(n::text, 'UTF8') from generate_series(1, {EVENTS}) n"
    )
    outbox.execute("analyze mailboat.outbox")
    of_others = EVENTS - EVENTS // KEYS
    seconds = {}
    for fails in (False, True):
        spec = {"partitions": 4, "delivery": DELIVERY}
        handled = Handled(Consumer(f"faults/view-{fails}".lower(), url=outbox.url, spec=spec))
        handled.fails = fails
        seconds[fails] = await handled.until(lambda: handled.count >= of_others, "the other keys")  # noqa: B023
        if not fails:
            await handled.stop()
    ratio = seconds[False] / seconds[True]
    record_property("rate beside a failing key", f"{ratio:.0%}")
    assert ratio > 0.5, "bench/ measures it; here is room for a busy machine"

    dead = "select attempts, convert_from(payload, 'UTF8')::int from mailboat.dead_letters order by dead_id"
    expected = [number for number in range(1, EVENTS + 1) if number % KEYS == int(POISON)]
    await await_until(lambda: len(outbox.execute(dead)) == len(expected), timeout=120, what="the dead letters")
    assert outbox.execute(dead) == [(ATTEMPTS, number) for number in expected]
    handled.fails = False
    assert await admin_actions.replay(outbox, key=POISON) == len(expected)
    await await_until(lambda: len(handled.poisoned) >= len(expected), what="the replayed events")
    await handled.stop()
    assert handled.poisoned == expected
    assert all(numbers == sorted(numbers) for numbers in handled.others.values())


@pytest.mark.verify
@pytest.mark.timeout(900)
async def test_the_other_keys_of_a_topic_keep_their_rate(
    kfake: KafkaServer,
    valkey: RedisServer,
    kafka_topic: Any,
    unique_name: Callable[[str], str],
    record_property: Callable[[str, object], None],
) -> None:
    """Both consumers read the topic at the same time, so both run under the same machine load.

    Handlers take 5 ms, so that the dead letters of the failing key keep up with the other keys.
    """
    topic, dead = kafka_topic(kfake, partitions=4), kafka_topic(kfake, partitions=1)
    feed = Feed(kfake, topic)
    for number in range(1, EVENTS + 1):
        feed.produce(str(number % KEYS), str(number).encode())
    feed.flush()

    def consumer() -> Consumer:
        return Consumer(
            f"faults/{unique_name('view')}",
            source=Kafka(kfake.bootstrap, topic=topic),
            idempotency=Redis(valkey.url),
            dead_letter=dead,
            spec={"delivery": {"maxAttempts": ATTEMPTS, "backoff": {"initial": "20ms", "max": "40ms"}}},
        )

    of_others, of_poison = EVENTS - EVENTS // KEYS, EVENTS // KEYS
    without, beside = Handled(consumer(), pause=0.005), Handled(consumer(), pause=0.005)
    beside.fails = True
    await await_until(lambda: min(without.count, beside.count) > 0, what="the first events")
    before = without.count, beside.count
    await await_until(lambda: without.count == of_others, timeout=300, what="all events without a failing key")
    ratio = (beside.count - before[1]) / (without.count - before[0])
    record_property("rate beside a failing key of a topic", f"{ratio:.0%}")
    await await_until(lambda: beside.count == of_others, timeout=300, what="all events beside a failing key")
    await await_until(lambda: beside.attempts == of_poison * ATTEMPTS, what="the dead letters")
    for handled in (without, beside):
        await handled.stop()
        assert all(numbers == sorted(numbers) for numbers in handled.others.values())
    assert ratio >= 0.9
