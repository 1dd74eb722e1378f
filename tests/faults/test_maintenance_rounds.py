"""Maintenance, lag queries and migrations that locks of other sessions block.

Delivery continues, and the status of the relay names the cause.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from mailboat.runtime.config_source import Configuration
from mailboat.runtime.relay import Relay
from mailboat.runtime.relay_status import RelayState
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.shutdown import StopRequested, unless_stopped
from mailboat.store.settings import RelayIdentity
from mailboat_devservers.postgres import Database
from mailboat_spec import read_documents
from support.inprocess_relay import STAGED, StagedSink, events, serving, staged_sinks_installed, status_of, write
from support.relay_processes import SWIFT, outbox_relay, subscription
from support.wait import PATIENCE, await_until

IMPATIENT = replace(SWIFT, probe_every=0.2)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[dict[str, StagedSink]]:
    with staged_sinks_installed(tmp_path) as stage:
        yield stage


def probers(database: Database) -> int:
    [(count,)] = database.execute(
        "select count(*) from pg_stat_activity where application_name = 'mailboat probe'"
        " and datname = current_database()"
    )
    return int(count)


@pytest.mark.verify
async def test_a_lock_that_blocks_lag_queries_stops_no_delivery(
    each_outbox: Database, stage: dict[str, StagedSink], caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee G7: the status keeps the last known lag and reports that it is old."""
    caplog.set_level(logging.INFO)
    orders = subscription("orders", STAGED, partitions=1)
    async with serving(outbox_relay(each_outbox.url), orders, timings=IMPATIENT) as relay:
        await await_until(lambda: probers(each_outbox) == 1, timeout=30, what="a first probe")
        with psycopg.connect(each_outbox.url) as person:
            person.execute("lock table mailboat.dead_letters in access exclusive mode")
            write(each_outbox.url, events(10, keys=2))
            await await_until(
                lambda: "lag is as it was last known" in (status_of(relay, "orders").last_error or ""),
                timeout=30,
                what="the probe to be given up",
            )
            write(each_outbox.url, events(10, keys=2, first=6))
            await await_until(lambda: len(stage["orders"].ids) == 20, timeout=30, what="delivery behind the lock")
            assert relay.status().state is RelayState.RUNNING
        await await_until(lambda: status_of(relay, "orders").last_error is None, timeout=30, what="lag to be known")
    said = [record.getMessage() for record in caplog.records]
    assert said.count("Connected.") == 1
    assert len([line for line in said if line.startswith("Lag query failed")]) == 1
    await await_until(lambda: probers(each_outbox) == 0, what="the probe's session to end")


async def test_failed_maintenance_is_reported_in_the_status_of_a_running_relay(
    each_outbox: Database, stage: dict[str, StagedSink]
) -> None:
    # the detached table blocks the creation of its time partition; no time partition is missing yet
    with psycopg.connect(each_outbox.url) as owner:
        [(name,)] = owner.execute(
            "select max(inhrelid::regclass::text) from pg_inherits where inhparent = 'mailboat.outbox'::regclass"
        ).fetchall()
        owner.execute(f"alter table mailboat.outbox detach partition {name}")
    manifest = outbox_relay(each_outbox.url, manageSchema=False)
    async with serving(manifest, subscription("orders", STAGED, partitions=1)) as relay:
        await await_until(lambda: "Upkeep of the outbox failed" in relay.status().message, timeout=30, what="a message")
        assert f"{name} is in the way" in relay.status().message
        assert relay.status().state is RelayState.RUNNING
        assert 28 < (relay.status().partitions_ahead_days or 0) < 30


async def test_a_wait_for_another_migration_is_reported_and_can_be_stopped(each_outbox: Database) -> None:
    read = read_documents([("relay", outbox_relay(each_outbox.url, table="shop.events"))])
    identity = RelayIdentity("relay-1", str(uuid.uuid4()))
    relay = Relay(Configuration(read.relays[0], ()), secrets=Secrets(None, {}), identity=identity, timings=IMPATIENT)
    stop = asyncio.Event()
    with psycopg.connect(each_outbox.url, application_name="by hand") as person:
        person.execute("lock table mailboat.migrations in share row exclusive mode")
        life = asyncio.create_task(relay.run(stop))
        await await_until(
            lambda: "another migration is under way (lock held by process" in relay.status().message,
            timeout=30,
            what="a word about the lock",
        )
        assert "application by hand" in relay.status().message
        assert relay.status().state is RelayState.CONNECTING
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await life
        assert relay.status().state is RelayState.STOPPING


async def test_the_states_of_a_relay_that_stops_while_a_batch_is_in_flight(
    each_outbox: Database, stage: dict[str, StagedSink]
) -> None:
    read = read_documents([("relay", outbox_relay(each_outbox.url)), ("orders", subscription("orders", STAGED))])
    identity = RelayIdentity("relay-1", str(uuid.uuid4()))
    relay = Relay(
        Configuration(read.relays[0], read.subscriptions),
        secrets=Secrets(None, {}),
        identity=identity,
        timings=SWIFT,
    )
    assert relay.status().state is RelayState.CONNECTING
    stop = asyncio.Event()
    life = asyncio.create_task(relay.run(stop))
    await await_until(lambda: relay.status().state is RelayState.RUNNING, timeout=30, what="the relay to run")
    stage["orders"].hold_answers()
    write(each_outbox.url, events(1, keys=1))
    await await_until(lambda: stage["orders"].publishes == 1, timeout=30, what="a batch in flight")
    stop.set()
    await await_until(lambda: relay.status().state is RelayState.STOPPING, timeout=30, what="the relay to stop")
    assert relay.status().database_reachable
    assert not life.done()
    stage["orders"].let_go()
    await life
    assert (relay.status().state, relay.status().message) == (RelayState.STOPPING, "stopped")
    assert len(stage["orders"].arrived) == 1


async def test_a_relay_continues_after_another_migration_ended(
    each_outbox: Database, stage: dict[str, StagedSink]
) -> None:
    with psycopg.connect(each_outbox.url) as person:
        person.execute("lock table mailboat.migrations in share row exclusive mode")
        manifest = outbox_relay(each_outbox.url, table="shop.events")
        async with serving(manifest, subscription("orders", STAGED), timings=IMPATIENT) as relay:
            await await_until(lambda: "another migration" in relay.status().message, timeout=30, what="the lock")
            person.rollback()
            await await_until(lambda: relay.status().state is RelayState.RUNNING, timeout=30, what="the relay to run")
            assert relay.status().message == ""


async def test_a_migration_that_is_being_applied_is_not_cut_and_all_else_is() -> None:
    stop, applied = asyncio.Event(), asyncio.Event()

    async def apply() -> str:
        stop.set()
        await applied.wait()
        return "applied"

    migrating = asyncio.ensure_future(unless_stopped(stop, apply(), in_the_middle=lambda: True))
    await await_until(stop.is_set, what="the word to stop")
    applied.set()
    assert await migrating == "applied"
    with pytest.raises(StopRequested):
        await unless_stopped(stop, asyncio.Event().wait())
