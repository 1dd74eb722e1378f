"""Two hundred subscriptions on one outbox: each relay reads the tail once for all, and none delays another."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from typing import Self

import pytest

from mailboat.runtime.relay import Relay
from mailboat.runtime.timings import Timings
from mailboat_devservers.postgres import Database
from support.inprocess_relay import STAGED, Load, StagedSink, events, serving, status_of, write
from support.ledger import Written, check_delivery
from support.manifests import Manifest
from support.relay_processes import outbox_relay, subscription
from support.wait import await_until

Stage = dict[str, StagedSink]

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

MANY = 200
SECONDS = 10.0
ROUNDS = 60


def _subscriptions(count: int) -> list[Manifest]:
    """Return subscriptions that start at the latest event. Every second one takes only types `order.*`."""
    filters: list[Manifest] = [{}, {"eventTypes": ["order.*"]}]
    from_now_on = {"from": "Latest"}
    return [
        subscription(f"s{n:03}", STAGED, partitions=1, filter=filters[n % 2], start=from_now_on) for n in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of relays for the server, and the time span of the cost."""

    transactions: int
    entries: int
    """Index entries of the outbox that were read."""
    rows: int
    """Rows of the outbox that sequential scans read."""
    seconds: float

    @classmethod
    async def so_far(cls, outbox: Database) -> Self:
        """Return the totals of all sessions, after every other session has ended.

        A session reports its statistics at intervals, and completely before it ends.
        """
        await await_until(lambda: outbox.execute(_SESSIONS) == [(0,)], what="the sessions to end")
        [(transactions, entries, rows)] = outbox.execute(_COSTS)
        return cls(int(transactions), int(entries), int(rows), time.monotonic())

    def __sub__(self, other: Self) -> Costs:
        mine, others = astuple(self), astuple(other)
        return Costs(*(after - before for after, before in zip(mine, others, strict=True)))


@dataclass(frozen=True, slots=True)
class Lives:
    """Costs of two relays from their start to their end: once idle, once under load."""

    subscriptions: int
    resting: Costs
    moving: Costs


_SESSIONS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"""
_COSTS = """
    select (select xact_commit + xact_rollback from pg_stat_database where datname = current_database()),
           (select sum(idx_tup_read) from pg_stat_user_indexes where relname ~ '^outbox_p'),
           (select sum(seq_tup_read) from pg_stat_user_tables where relname ~ '^outbox_p')"""


async def _lives(outbox: Database, stage: Stage, count: int) -> Lives:
    manifests = (outbox_relay(outbox.url), *_subscriptions(count))
    committed: dict[str, Written] = {}

    async def life(during: Callable[[], Awaitable[None]]) -> Costs:
        before = await Costs.so_far(outbox)
        async with (
            serving(*manifests, relay="relay-1", timings=None) as one,
            serving(*manifests, relay="relay-2", timings=None) as two,
        ):
            await _all_owned((one, two), count)
            await during()
        return await Costs.so_far(outbox) - before

    async def trickle() -> None:
        load = Load(outbox.url, 1, committed)
        for _ in range(ROUNDS):
            load.write_some()
            await _arrived(committed, list(stage.values()))

    lives = Lives(count, await life(lambda: _pass(SECONDS)), await life(trickle))
    for sink in stage.values():
        check_delivery(committed, (), sink.arrivals, gapless=False)
    outbox.execute("delete from mailboat.subscriptions")
    stage.clear()
    return lives


async def _pass(seconds: float) -> None:
    until = time.monotonic() + seconds
    await await_until(lambda: time.monotonic() > until, timeout=seconds + 30, what="time to pass")


async def _arrived(written: Collection[str], sinks: Sequence[StagedSink]) -> None:
    await await_until(
        lambda: all(sink.ids.issuperset(written) for sink in sinks), timeout=40, what="the events to arrive everywhere"
    )


async def _all_owned(relays: Sequence[Relay], count: int) -> None:
    def owned() -> int:
        return sum(len(s.owned) for relay in relays for s in relay.status().subscriptions)

    await await_until(lambda: owned() == count, timeout=60, what=f"{count} partitions to be owned")


async def test_the_tail_is_read_once_for_all_of_them(outbox: Database, stage: Stage) -> None:
    """Count the cost of complete runs of two relays: one run idle, one run under a trickle of events."""
    one, many = [await _lives(outbox, stage, count) for count in (1, MANY)]
    shown = f"\n{one}\n{many}"
    print(shown)  # noqa: T201 - shown with -s
    assert {life.rows for lives in (one, many) for life in (lives.resting, lives.moving)} == {0}, (
        f"rows of the outbox were read by sequential scans: {shown}"
    )
    # The start and the end have a price per subscription. Both relays declare the subscription and compare its
    # partitions. Its partition is acquired, polled and released, twice if the first relay acquired it before the second
    # relay registered, or again after the second relay left. Its lag is queried once.
    beginning = 2 * 2 * MANY + 2 * 3 * MANY + MANY
    # After the start, time costs as much as with one subscription. Only lag queries grow with the number of
    # subscriptions, by one query each in ten seconds. The price of an event does not depend on the number of
    # subscriptions.
    a_second = one.resting.transactions / one.resting.seconds + MANY / 10
    an_event = 2 * one.moving.transactions / ROUNDS
    assert many.resting.transactions <= beginning + a_second * many.resting.seconds, shown
    # While events move, lag is queried at the highest rate, and a query may read one of the events.
    probes = MANY * (1 + many.moving.seconds / Timings().probe_every)
    assert many.moving.transactions <= beginning + a_second * many.moving.seconds + an_event * ROUNDS + probes, shown
    # Each relay reads an event once for all subscriptions, or a few times if some of them have not settled the previous
    # event. If every subscription read for itself, there would be two hundred times as many reads.
    assert one.moving.entries >= ROUNDS, shown
    assert many.moving.entries <= many.resting.entries + 2 * 5 * ROUNDS + probes, shown


async def test_failing_and_slow_subscriptions_do_not_delay_others(outbox: Database, stage: Stage) -> None:
    backoff = {"initial": "100ms", "max": "200ms"}
    failing = {"timeout": "5s", "backoff": backoff, "maxAttempts": 1000}
    troubled = [subscription(name, STAGED, partitions=1, delivery=failing) for name in ("refusing", "away", "slow")]
    manifests = (outbox_relay(outbox.url), *_subscriptions(MANY), *troubled)
    committed: dict[str, Written] = {}
    async with (
        serving(*manifests, relay="relay-1", timings=None) as one,
        serving(*manifests, relay="relay-2", timings=None) as two,
    ):
        await _all_owned((one, two), MANY + 3)
        stage["refusing"].refuse(lambda message: True)
        stage["away"].go_away()
        stage["slow"].hold_answers()
        others = [sink for name, sink in stage.items() if name.startswith(("s0", "s1"))]
        waits: list[float] = []
        for number in range(1, 31):
            began = time.monotonic()
            written = write(outbox.url, events(20, 20, first=number))
            committed |= written
            await _arrived(written, others)
            waits.append(time.monotonic() - began)
        waits.sort()
        assert waits[len(waits) // 2] < 3.0, f"half of the rounds took longer than {waits[len(waits) // 2]:.1f} s"
        assert not stage["refusing"].arrived
        assert not stage["away"].arrived

        stage["refusing"].refuse(None)
        stage["away"].come_back()
        stage["slow"].let_go()
        for name in ("refusing", "away", "slow"):
            await _arrived(committed, [stage[name]])
            check_delivery(committed, (), stage[name].arrivals, kills=1, gapless=False)
        mover = one if status_of(one, "away").owned else two
        await await_until(lambda: status_of(mover, "away").lag == 0, what="rest")
    for sink in others:
        check_delivery(committed, (), sink.arrivals, gapless=False)
