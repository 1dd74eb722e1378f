"""Retention of a partitioned table that the user created: its looser constraints must not cost an undelivered event."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from mailboat.store.schema.time_partitions import RetentionReport, RetentionSweep
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from support.store_backends import PostgresWorld, subscription
from support.store_relays import Relay

MIDNIGHT = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
OLD = MIDNIGHT - timedelta(days=60)


@pytest.fixture
def lax(each_outbox: Database) -> Database:
    """An outbox that accepts events without a transaction id, and has one in an expired time partition."""
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute("alter table mailboat.outbox alter xid drop not null")
        day = f"for values from ('{OLD.isoformat()}') to ('{(OLD + timedelta(days=1)).isoformat()}')"
        connection.execute(f"create table mailboat.outbox_old partition of mailboat.outbox {day}".encode())
        connection.execute(
            "insert into mailboat.outbox (event_type, payload, created_at, xid) values ('x', '{}', %s, null)", [OLD]
        )
    return each_outbox


async def sweep(database: Database) -> RetentionReport:
    async with await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        expired = OLD + timedelta(days=1)
        return await RetentionSweep(connection, TableLayout(), expired, now=datetime.now(UTC), detach_wait=60).run()


async def test_an_event_without_a_transaction_id_hides_no_undelivered_one(lax: Database) -> None:
    world = PostgresWorld(lax)
    relay = await Relay.start(world, [subscription(partitions=1)])
    await relay.claim()
    with psycopg.connect(lax.url) as connection:
        connection.execute(
            "insert into mailboat.outbox (event_type, payload, created_at) values ('x', '{}', %s)", [OLD]
        )
    report = await sweep(lax)
    assert [(each.partition, each.subscription) for each in report.blocked] == [("mailboat.outbox_old", "shop/all")]
    assert report.dropped == ()
    assert len(await relay.drained()) == 1
    await world.close()
    assert (await sweep(lax)).dropped == ("mailboat.outbox_old",)
