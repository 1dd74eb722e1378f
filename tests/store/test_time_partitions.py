"""Polls leave out the empty time partitions made ahead, and lose no event that lies in one of them (G1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest_asyncio

from mailboat.store.outbox_store import Settlement
from mailboat.store.windows import MOST_UNCHECKED
from mailboat_devservers.postgres import Database
from support.store_backends import PostgresWorld, subscription
from support.store_relays import Relay
from support.wait import await_until

TODAY = datetime.now(UTC)
_SCANS = """
    select coalesce(sum(idx_scan) filter (where relname > to_char(now(), '"outbox_p"YYYYMMDD')), 0)::int,
           coalesce(sum(idx_scan), 0)::int
    from pg_stat_user_indexes where relname ~ '^outbox_p'"""
_SESSIONS = (
    "select count(*) from pg_stat_activity where application_name ~ '^mailboat ' and datname = current_database()"
)


@pytest_asyncio.fixture
async def relay(each_outbox: Database) -> AsyncIterator[Relay]:
    """A relay that has polled before, and has cached which time partitions are empty."""
    world = PostgresWorld(each_outbox)
    relay = await Relay.start(world, [subscription(partitions=1)])
    await relay.claim()
    assert await drained(relay) == []
    yield relay
    await world.close()


def insert(connection: psycopg.Connection[tuple[object, ...]], created_at: datetime) -> int:
    [(position,)] = connection.execute(
        "insert into mailboat.outbox (event_type, payload, created_at) values ('x', '{}', %s) returning id",
        [created_at],
    ).fetchall()
    return int(str(position))


async def drained(relay: Relay) -> list[int]:
    return [event.id for event in await relay.drained()]


async def test_an_event_in_a_time_partition_that_was_empty_is_delivered(each_outbox: Database, relay: Relay) -> None:
    for days in (0, 1, 20, 2, 30, 0):
        with psycopg.connect(each_outbox.url) as connection:
            position = insert(connection, TODAY + timedelta(days=days))
        assert await drained(relay) == [position]


async def test_the_check_is_left_to_a_later_tick_that_settles_nothing_or_finds_events(
    each_outbox: Database, relay: Relay
) -> None:
    for then in ("nothing", "an event"):
        with psycopg.connect(each_outbox.url) as connection:
            insert(connection, TODAY)
        [settlement] = await settlements(relay)
        with psycopg.connect(each_outbox.url) as connection:
            expected = [insert(connection, TODAY + timedelta(days=10 if then == "nothing" else 20))]
            if then == "an event":
                expected.append(insert(connection, TODAY))
        if then == "nothing":
            assert (await relay.tick(settlement)).quiet
            assert await drained(relay) == expected
        else:
            [opened] = (await relay.tick(settlement)).opened
            assert [event.id for events in (await relay.events(opened)).values() for event in events] == expected


async def test_a_relay_that_settles_without_a_break_finds_the_events_of_a_new_day(
    each_outbox: Database, relay: Relay
) -> None:
    with psycopg.connect(each_outbox.url) as connection:
        insert(connection, TODAY)
    [closing] = await settlements(relay)
    assert (await relay.tick(closing)).quiet
    with psycopg.connect(each_outbox.url) as connection:
        insert(connection, TODAY + timedelta(days=1))
    parked_only = Settlement(closing.lease, None)
    found = [bool((await relay.tick(parked_only)).opened) for _ in range(MOST_UNCHECKED)]
    assert found == [False] * (MOST_UNCHECKED - 1) + [True]


async def settlements(relay: Relay) -> list[Settlement]:
    """Open a window and return the settlements that close it."""
    [opened] = (await relay.tick()).opened
    return [
        Settlement(lease, opened.window.window_snapshot, 0, relay.sequence[lease.key] + 1, closes=True)
        for lease in opened.members
    ]


async def test_a_late_commit_into_a_time_partition_that_was_empty_is_delivered(
    each_outbox: Database, relay: Relay
) -> None:
    with psycopg.connect(each_outbox.url) as late:
        ahead = insert(late, TODAY + timedelta(days=5))
        with psycopg.connect(each_outbox.url) as connection:
            position = insert(connection, TODAY)
        assert await drained(relay) == [position]
    assert await drained(relay) == [ahead]


async def test_an_event_in_a_time_partition_made_later_is_delivered(each_outbox: Database, relay: Relay) -> None:
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute("select mailboat.ensure_partitions('mailboat.outbox', '40 days')")
        position = insert(connection, TODAY + timedelta(days=39))
    assert await drained(relay) == [position]


async def test_an_event_in_a_default_partition_is_delivered(each_outbox: Database, relay: Relay) -> None:
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute("create table mailboat.outbox_rest partition of mailboat.outbox default")
        position = insert(connection, TODAY + timedelta(days=4000))
    assert await drained(relay) == [position]
    with psycopg.connect(each_outbox.url) as connection:
        position = insert(connection, TODAY - timedelta(days=4000))
    assert await drained(relay) == [position]


async def test_events_of_a_table_that_replaced_the_outbox_are_delivered(each_outbox: Database, relay: Relay) -> None:
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute("alter table mailboat.outbox rename to former")
        connection.execute("create table mailboat.outbox (like mailboat.former including defaults including generated)")
        connection.execute("create index on mailboat.outbox (xid)")
        position = insert(connection, TODAY + timedelta(days=20))
    assert await drained(relay) == [position]


async def test_empty_time_partitions_are_not_scanned(each_outbox: Database, relay: Relay) -> None:
    with psycopg.connect(each_outbox.url) as connection:
        position = insert(connection, TODAY)
    assert await drained(relay) == [position]
    for _ in range(10):
        assert (await relay.tick()).quiet
    await relay.store.close(leave=True)
    await await_until(lambda: each_outbox.execute(_SESSIONS) == [(0,)], what="the sessions to end")
    # A session sends its counts before it ends. A server before version 15 processes them later, in the same order, so
    # the count of a scan that begins now is the last one.
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute("set enable_seqscan = off")
        connection.execute(f"select from mailboat.outbox_p{TODAY + timedelta(days=1):%Y%m%d} where xid = '1'".encode())
    await await_until(lambda: each_outbox.execute(_SCANS)[0][0] > 0, what="the count of the last scan")
    [(ahead, scans)] = each_outbox.execute(_SCANS)
    assert scans > ahead
    assert ahead == 1, f"{ahead - 1} index scans of the relay were of time partitions without a row"
