"""The whole relay behind PgBouncer in transaction mode, which the relay detects.

There is no session in this mode: no LISTEN, no liveness lock, no prepared statements, no start-up options. The relay
polls, and its leases expire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mailboat_devservers.pgbouncer import PgBouncer, start_pgbouncer
from mailboat_devservers.postgres import Database
from support.inprocess_relay import STAGED, Load, StagedSink, serving, status_of
from support.ledger import Written, check_delivery
from support.relay_processes import SWIFT, Fleet, outbox_relay, owners, subscription
from support.wait import await_until, wait_until

Stage = dict[str, StagedSink]

EXPIRING = dataclasses.replace(SWIFT, lease_ttl=6.0, overdue_after=0.5)


@pytest.fixture
def bouncer(
    tmp_path: Path, outbox: Database, or_skip: Callable[[Callable[[], PgBouncer]], PgBouncer]
) -> Iterator[PgBouncer]:
    with or_skip(lambda: start_pgbouncer(tmp_path / "bouncer", outbox.server)) as bouncer:
        yield bouncer


async def test_delivery_needs_no_session(outbox: Database, bouncer: PgBouncer, stage: Stage) -> None:
    committed: dict[str, Written] = {}
    load = Load(outbox.url, 20, committed)
    manifests = outbox_relay(bouncer.url(outbox.name)), subscription("orders", STAGED, partitions=4)
    async with serving(*manifests) as relay:
        with load.flowing():
            await await_until(lambda: len(stage.get("orders", StagedSink()).arrived) > 200, timeout=60, what="the flow")
            await load.goes_on(30)
        await await_until(lambda: len(stage["orders"].arrived) >= len(committed), what="all events")
        await await_until(lambda: status_of(relay, "orders").lag == 0, what="rest")
        load.write_some()  # without NOTIFY: the poll must find these events
        await await_until(lambda: len(stage["orders"].arrived) >= len(committed), what="the last of them")

        assert outbox.execute("select session_lock from mailboat.relays") == [(False,)]
        assert outbox.execute("select count(*) from mailboat.wakeup_requests where active") == [(0,)]
        [(database,)] = outbox.execute("select oid from pg_database where datname = current_database()")
        locks = outbox.execute("select database from pg_locks where locktype = 'advisory'")
        assert (database,) not in locks
    check_delivery(committed, (), stage["orders"].arrivals)


async def test_unavailable_sinks_are_served_behind_a_pooler_too(
    outbox: Database, bouncer: PgBouncer, stage: Stage
) -> None:
    committed: dict[str, Written] = {}
    load = Load(outbox.url, 10, committed)
    backoff = {"initial": "50ms", "max": "50ms"}
    delivery = {"timeout": "5s", "maxAttempts": 100, "backoff": backoff}
    manifests = outbox_relay(bouncer.url(outbox.name)), subscription("orders", STAGED, delivery=delivery)
    async with serving(*manifests) as relay:
        await await_until(lambda: status_of(relay, "orders").owned, what="the relay")
        stage["orders"].refuse(lambda message: message.key == "key 1")
        for _ in range(20):
            load.write_some()
        await await_until(lambda: len(stage["orders"].arrived) == 180, what="the other keys")
        await await_until(lambda: status_of(relay, "orders").parked == 20, what="the parked key")
        stage["orders"].refuse(None)
        await await_until(lambda: len(stage["orders"].arrived) == 200, what="the parked key's return")
    check_delivery(committed, (), stage["orders"].arrivals, gapless=False)


@pytest.mark.verify
def test_partitions_of_a_dead_relay_are_taken_over_once_its_lease_expires(
    outbox: Database, bouncer: PgBouncer, tmp_path: Path
) -> None:
    log = tmp_path / "arrived.jsonl"
    delivery = {"timeout": "2s"}
    orders = subscription("orders", {"log": {"path": str(log)}}, partitions=4, delivery=delivery)
    manifests = [outbox_relay(bouncer.url(outbox.name)), orders]
    committed: dict[str, Written] = {}
    load = Load(outbox.url, 20, committed)
    with Fleet(tmp_path / "fleet", manifests, timings=EXPIRING) as fleet:
        first, second = fleet.start_connected(2)
        wait_until(
            lambda: set(owners(outbox.url).values()) == {first.relay, second.relay}, timeout=60, what="a share each"
        )
        fleet.kill(first)
        load.write_some()
        wait_until(lambda: set(owners(outbox.url).values()) == {second.relay}, timeout=60, what="the take-over")
        load.write_some()
        wait_until(
            lambda: all(event_id in log.read_text() for event_id in committed), timeout=60, what="all of the events"
        )
        fleet.stop(second)
