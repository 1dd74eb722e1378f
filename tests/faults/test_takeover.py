"""Partition ownership while relays die, start, freeze, stop, or follow an assignment from outside."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from support.collectors import KafkaCollector
from support.inprocess_relay import events, serving, status_of, write
from support.ledger import check_delivery
from support.manifests import kafka_sink
from support.racing_writers import Racers
from support.relay_processes import SWIFT, Fleet, RelayProcess, outbox_relay, owners, shares, subscription
from support.wait import await_until, wait_until

PARTITIONS = 8


@pytest.fixture
def launch(
    outbox: Database, kfake: KafkaServer, collector: KafkaCollector, tmp_path: Path
) -> Iterator[Callable[..., Fleet]]:
    """Factory of fleets without relays, as in ``launch(timings=SWIFT)``. Other arguments are passed to ``Fleet``."""
    with ExitStack() as fleets:

        def create(*, delivery_timeout: str = "10s", **settings: Any) -> Fleet:
            sink = kafka_sink(kfake.bootstrap, collector.topic)
            delivery = {"timeout": delivery_timeout}
            stream = subscription("kfake", sink, partitions=PARTITIONS, delivery=delivery)
            return fleets.enter_context(Fleet(tmp_path / "fleet", [outbox_relay(outbox.url), stream], **settings))

        yield create


def settled_shares(url: str, relays: int) -> list[int]:
    """Wait until ownership is balanced and return the number of partitions of each relay."""
    low, high = PARTITIONS // relays, -(-PARTITIONS // relays)

    def balanced() -> list[int]:
        counts = shares(url)
        fair = None not in counts and len(counts) == relays and all(low <= n <= high for n in counts.values())
        return sorted(counts[name] for name in counts) if fair else []

    return wait_until(balanced, 60, f"{relays} relays to share {PARTITIONS} partitions; now {shares(url)}")


def finish(racers: Racers, collector: KafkaCollector, kills: int) -> None:
    ledger = racers.finish()
    collector.until_all(ledger.committed, timeout=60)
    collector.until_quiet()
    check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals, kills=kills)


# ---- death and birth ----------------------------------------------------------------------------------------------


def test_a_killed_relay_is_taken_over_and_a_new_one_gets_its_share(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    fleet = launch(timings=None)  # the default timings
    with Racers(outbox.url, writers=4, seed=21) as racers:
        relays = fleet.start_connected(3)
        assert settled_shares(outbox.url, 3) == [2, 3, 3]

        victim = relays[0].relay
        fleet.kill(relays[0])
        killed_at = time.monotonic()
        # The lease of the dead relay would expire after 15 seconds. Its released liveness lock shows the death at once.
        wait_until(lambda: victim not in shares(outbox.url), 30, "the others to take over what the dead relay had")
        took = time.monotonic() - killed_at
        assert settled_shares(outbox.url, 2) == [4, 4]

        fleet.start_connected(1)
        assert settled_shares(outbox.url, 3) == [2, 3, 3]
        finish(racers, collector, fleet.kills)
    print(f"taken over after {took:.1f} s")  # noqa: T201 - shown with -s


def test_a_relay_frozen_past_its_lease_loses_it_and_changes_nothing(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    fleet = launch(timings=replace(SWIFT, lease_ttl=4.0), delivery_timeout="2s")  # shorter than a lease
    with Racers(outbox.url, writers=4, seed=22) as racers:
        sleeper, other = fleet.start_connected(2)
        settled_shares(outbox.url, 2)
        sleeper.suspend()  # its sessions and its liveness lock stay, so only the expiry of the lease counts
        wait_until(
            lambda: set(owners(outbox.url).values()) == {other.relay}, 60, "the other relay to take over at expiry"
        )
        racers.wait(1.0)
        sleeper.resume()
        settled_shares(outbox.url, 2)
        # The suspended relay may send its batches in flight again: one interruption, like a kill.
        finish(racers, collector, kills=1)


@pytest.mark.verify
def test_a_frozen_relay_is_replaced_within_twenty_seconds_with_the_timings_of_a_user(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    # longer than a lease: heartbeats renew the lease during a delivery
    fleet = launch(timings=None, delivery_timeout="30s")
    with Racers(outbox.url, writers=4, seed=28) as racers:
        sleeper, other = fleet.start_connected(2)
        settled_shares(outbox.url, 2)
        sleeper.suspend()
        frozen_at = time.monotonic()
        wait_until(lambda: set(owners(outbox.url).values()) == {other.relay}, 60, "the other relay to take over")
        took = time.monotonic() - frozen_at
        sleeper.resume()
        settled_shares(outbox.url, 2)
        finish(racers, collector, kills=1)
    assert took < 20, f"taken over after {took:.1f} s (G7)"


async def test_the_lag_of_a_frozen_relay_is_counted_and_its_name_reported_by_another(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    timings = replace(SWIFT, lease_ttl=120.0)  # no takeover, so the events keep waiting and are counted
    fleet = launch(timings=timings)
    async with serving(*fleet.manifests, relay="a-watcher", timings=timings) as watcher:
        (sleeper,) = fleet.start_connected(1)
        await asyncio.to_thread(settled_shares, outbox.url, 2)
        sleeper.suspend()
        committed = write(outbox.url, events(64, keys=64))
        theirs = [p for (_, p), owner in owners(outbox.url).items() if owner == sleeper.relay]
        waiting = f"select count(*) from mailboat.outbox where slot %% {PARTITIONS} = any (%s)"
        with psycopg.connect(outbox.url) as connection:
            (expected,) = connection.execute(waiting, [theirs]).fetchone() or (0,)

        def counted() -> bool:
            seen = status_of(watcher, "kfake")
            named = watcher.status().silent == (sleeper.relay,) and [o.partition for o in seen.orphans] == sorted(
                theirs
            )
            return named and seen.lag == sum(o.lag for o in seen.orphans) == expected > 0

        await await_until(counted, 30, f"{expected} events of {sleeper.relay} to be counted")
        sleeper.resume()
        await asyncio.to_thread(collector.until_all, committed, timeout=60)
        await await_until(lambda: not status_of(watcher, "kfake").orphans, 30, "nothing to be orphaned any more")


# ---- orderly stop -------------------------------------------------------------------------------------------------


def test_sigterm_finishes_settles_and_releases_so_that_nothing_is_sent_twice(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    fleet = launch()
    with Racers(outbox.url, writers=4, seed=23) as racers:
        first, second = fleet.start_connected(2)
        for leaver, stayer in ((first, second), (second, None)):
            racers.wait(1.0)
            fleet.stop(leaver)
            assert leaver.relay not in owners(outbox.url).values()
            if stayer is not None:
                wait_until(lambda: set(owners(outbox.url).values()) == {second.relay}, 60, "the other one to have all")
        assert outbox.execute("select distinct released, owner from mailboat.cursors") == [(True, None)]
        assert outbox.execute("select count(*) from mailboat.relays") == [(0,)]

        fleet.start_connected(1)
        finish(racers, collector, kills=0)
    assert outbox.execute("select max(crash_count) from mailboat.cursors") == [(0,)]


@pytest.mark.verify
def test_rolling_restarts_send_nothing_twice(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    fleet = launch()
    with Racers(outbox.url, writers=4, seed=24) as racers:
        fleet.start_connected(2)
        for _ in range(3):
            oldest = next(iter(fleet.relays.values()))
            fleet.start_connected(1)
            fleet.stop(oldest)
        finish(racers, collector, kills=0)


# ---- assignment from outside --------------------------------------------------------------------------------------


def _assign(outbox: Database, owners: dict[int, str]) -> None:
    """Write an assignment in the way of a relay that received one."""
    with psycopg.connect(outbox.url, autocommit=True) as connection:
        for partition, relay in owners.items():
            connection.execute("update mailboat.cursors set assigned_to = %s where partition = %s", [relay, partition])


def _until_all_with(outbox: Database, relay: RelayProcess) -> None:
    wait_until(lambda: set(owners(outbox.url).values()) == {relay.relay}, 60, f"everything to be with {relay.relay}")


@pytest.mark.verify
def test_assignments_under_load_cost_no_session(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    fleet = launch(timings=None)
    with Racers(outbox.url, writers=6, dawdle=0.002, seed=27) as racers:
        first, second = fleet.start_connected(2)
        settled_shares(outbox.url, 2)
        for turn in range(1, 16):
            _assign(outbox, {p: (first, second)[(p + turn // 5) % 2].relay for p in range(PARTITIONS)})
            racers.wait(0.4)
        finish(racers, collector, kills=0)
        assert (first.connections, second.connections) == (1, 1), "an assignment made a relay begin anew"


@pytest.mark.verify
def test_partitions_of_a_relay_that_lost_the_database_go_to_their_assigned_owners(
    outbox: Database, collector: KafkaCollector, launch: Callable[..., Fleet]
) -> None:
    fleet = launch(timings=replace(SWIFT, overdue_after=8.0))  # the relay reconnects before its peers count it as dead
    with Racers(outbox.url, writers=2, seed=26) as racers:
        first, second = fleet.start_connected(2)
        settled_shares(outbox.url, 2)
        # The relay loses its connections. Before it reconnects, all partitions are assigned to the other relay. The
        # tables then name the first relay as the owner of partitions that it does not hold and should not own.
        first.suspend()
        with psycopg.connect(outbox.url, autocommit=True) as connection:
            connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and application_name like 'mailboat %'"
            )
        _assign(outbox, dict.fromkeys(range(PARTITIONS), second.relay))
        first.resume()
        _until_all_with(outbox, second)
        assert first.running
        # A closed connection is an interruption: batches in flight are sent again.
        finish(racers, collector, kills=1)


# ---- connections --------------------------------------------------------------------------------------------------


@pytest.mark.verify
async def test_fifty_relays_share_eight_partitions_and_the_idle_ones_hold_one_connection_each(
    outbox: Database, tmp_path: Path
) -> None:
    manifests = [
        outbox_relay(outbox.url),
        subscription("file", {"log": {"path": str(tmp_path / "arrived")}}, partitions=PARTITIONS),
    ]
    async with AsyncExitStack() as stack:
        for number in range(50):
            await stack.enter_async_context(serving(*manifests, relay=f"pod-{number}", timings=None))

        def at_rest() -> bool:
            counts = shares(outbox.url)
            busy = [relay for relay, count in counts.items() if count]
            return None not in counts and len(busy) == PARTITIONS and _connections(outbox)["control"] == 50

        await await_until(at_rest, 150, "fifty relays to be connected, eight of them with a partition")

        # An idle relay has one connection, `control`. An owner has two more.
        def few() -> bool:
            found = _connections(outbox)
            each = found["work"] <= PARTITIONS and found["read"] <= PARTITIONS
            return each and found.total() <= 50 + 2 * PARTITIONS

        await await_until(few, 60, "the idle ones to let go of the rest")


def _connections(outbox: Database) -> Counter[str]:
    """Count the connections of relays by their purpose."""
    rows = outbox.execute(
        "select application_name from pg_stat_activity"
        " where datname = current_database() and application_name like 'mailboat %'"
    )
    return Counter(name.removeprefix("mailboat ") for (name,) in rows)
