"""A key whose events always fail delays no other key, and comes back in order when it is replayed (C6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from mailboat import Consumer, Event
from mailboat_harbor.postgres import Database
from support import admin_actions
from support.wait import await_until

EVENTS, KEYS, POISON = 20_000, 1_000, "7"
ATTEMPTS = 3


class Handled:
    """What a consumer has handled, in order, and how long the first so many took."""

    def __init__(self, url: str, name: str) -> None:
        delivery = {"maxAttempts": ATTEMPTS, "backoff": {"initial": "100ms", "max": "200ms"}}
        self.poisoned: list[int] = []
        self.others: dict[str, list[int]] = {}
        self._seen: set[int] = set()
        self.fails = False
        self._stop = asyncio.Event()
        view = Consumer(f"faults/{name}", url=url, spec={"partitions": 4, "delivery": delivery})
        view.on("*")(self._handle)
        self._serving = asyncio.create_task(view.serve(self._stop))

    async def _handle(self, number: int, event: Event) -> None:
        if event.key == POISON:
            if self.fails:
                raise ValueError("always")
            self.poisoned.append(number)
        elif number not in self._seen:  # a batch that is rolled back because of the poison is handled again
            self._seen.add(number)
            self.others.setdefault(event.key or "", []).append(number)

    @property
    def count(self) -> int:
        return len(self._seen)

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds from the first event until the condition holds."""
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
        handled = Handled(outbox.url, f"view-{fails}".lower())
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
