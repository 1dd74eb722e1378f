"""Two hundred subscriptions on one outbox: the tail is read once for all of them, and none slows another."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import pytest

from faults.fleet import Manifest, outbox_relay, subscription
from faults.inprocess import STAGED, Load, StagedSink, afloat, events, status_of, write
from faults.ledger import Written, check_delivery
from mailboat.runtime.relay import Relay
from mailboat_harbor.postgres import Database
from waiting import await_until

Stage = dict[str, StagedSink]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

MANY = 200
SECONDS = 8.0


def _subscriptions(count: int) -> list[Manifest]:
    """Every second one wants only what is called order."""
    filters: list[Manifest] = [{}, {"eventTypes": ["order.*"]}]
    return [subscription(f"s{n:03}", STAGED, partitions=1, filter=filters[n % 2]) for n in range(count)]


def _transactions(outbox: Database) -> int:
    [(committed,)] = outbox.execute("select xact_commit from pg_stat_database where datname = current_database()")
    return int(committed)


async def _rate(outbox: Database, seconds: float = SECONDS) -> float:
    """Transactions per second of everybody on the database."""
    await _pass(11)  # a session that does little reports only then what it did before
    before, began = _transactions(outbox), time.monotonic()
    await _pass(seconds)
    return (_transactions(outbox) - before) / (time.monotonic() - began)


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
    rates: dict[tuple[int, str], float] = {}
    for count in (1, MANY):
        committed: dict[str, Written] = {}
        manifests = (outbox_relay(outbox.url), *_subscriptions(count))
        async with (
            afloat(*manifests, relay="relay-1", timings=None) as one,
            afloat(*manifests, relay="relay-2", timings=None) as two,
        ):
            await _all_owned((one, two), count)
            await await_until(lambda: all(r.status().subscriptions[0].lag == 0 for r in (one, two)), what="rest")
            rates[count, "at rest"] = await _rate(outbox)
            load = Load(outbox.url, 1, committed)
            with load.flowing(pause=0.1):
                rates[count, "under a trickle"] = await _rate(outbox) - 1 / 0.1
            await _arrived(committed, list(stage.values()))
        for sink in stage.values():
            arrivals = [arrival for arrival in sink.arrivals if arrival.event_id in committed]
            check_delivery(committed, (), arrivals, gapless=False)
        outbox.execute("delete from mailboat.subscriptions")
        stage.clear()
    shown = ", ".join(f"{count} {when}: {rate:.0f}/s" for (count, when), rate in rates.items())
    # Only lag probes grow with their number: one of each every ten seconds or more.
    assert rates[MANY, "at rest"] <= rates[1, "at rest"] + MANY / SECONDS + 20, shown
    assert rates[MANY, "under a trickle"] <= 2 * rates[1, "under a trickle"] + MANY / SECONDS + 20, shown


async def test_one_that_fails_and_one_that_is_slow_hold_up_nobody(outbox: Database, stage: Stage) -> None:
    backoff = {"initial": "100ms", "max": "200ms"}
    failing = {"timeout": "5s", "backoff": backoff, "maxAttempts": 1000}
    troubled = [subscription(name, STAGED, partitions=1, delivery=failing) for name in ("refusing", "away", "slow")]
    manifests = (outbox_relay(outbox.url), *_subscriptions(MANY), *troubled)
    committed: dict[str, Written] = {}
    async with (
        afloat(*manifests, relay="relay-1", timings=None) as one,
        afloat(*manifests, relay="relay-2", timings=None) as two,
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
