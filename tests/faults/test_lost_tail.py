"""The tail of the log is lost under the relays: a crash with asynchronous commits, a lagging standby that is promoted.

The server then hands out positions (ids) and transaction ids a second time, for other events. Each test makes sure that
this really happened, and that every event which is in the table in the end was delivered, under its own identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from conftest import TopicFactory
from faults.collectors import KafkaCollector
from faults.fleet import WALKING, Fleet, kafka_sink, outbox_relay, subscription
from faults.ledger import Arrival, Written, check_delivery, in_the_table, payload
from faults.racing import ACCOUNTS
from mailboat.outbox.migrate import migrate
from mailboat_harbor.kafka import KafkaServer
from mailboat_harbor.postgres import PostgresServer, find_postgres
from waiting import wait_until

KEYS = 12

NEVER_FLUSHED = {
    "wal_writer_delay": "10s",
    "wal_writer_flush_after": "1GB",
    "autovacuum": "off",
    "bgwriter_lru_maxpages": "0",
}
"""Nobody but a commit that waits for it writes the log out: what was committed asynchronously after that is lost."""


@dataclass(frozen=True, slots=True)
class Row:
    """An event with what the server gave it."""

    event: Written
    id: int
    xid: int


def write(url: str, count: int, *, asynchronous: bool = False) -> list[Row]:
    """Events of a few keys, a transaction each. What this returns was committed, and may get lost all the same."""
    rows = []
    with psycopg.connect(url, autocommit=True) as connection:
        if asynchronous:
            connection.execute("set synchronous_commit = off")
        for index in range(count):
            rows.append(_write(connection, f"account-{1 + index % KEYS}"))
    return rows


def _write(connection: psycopg.Connection[tuple[Any, ...]], key: str) -> Row:
    with connection.transaction():
        (number,) = _one(connection, "update accounts set number = number + 1 where key = %s returning number", key)
        content = payload(key, number)
        event_id, id_, xid = _one(
            connection,
            "insert into mailboat.outbox (event_type, key, payload) values ('tail.lost', %s, %s)"
            " returning event_id::text, id, xid::text::bigint",
            key,
            content,
        )
    return Row(Written(event_id, key, number, content), id_, xid)


def _one(connection: psycopg.Connection[tuple[Any, ...]], statement: str, *values: object) -> tuple[Any, ...]:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return row


@pytest.fixture
def primary(tmp_path: Path, or_skip: Callable[[Callable[[], PostgresServer]], PostgresServer]) -> PostgresServer:
    """A server of the test's own, with an outbox in its database ``postgres``; ends with the test run at the latest."""
    server = or_skip(lambda: PostgresServer.start(find_postgres(), tmp_path / "primary", settings=NEVER_FLUSHED))
    asyncio.run(_migrate(server.url()))
    with psycopg.connect(server.url()) as connection:
        connection.execute(ACCOUNTS.format(keys=KEYS))
    return server


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await migrate(connection, "mailboat.outbox")


def assert_reused(lost: Collection[Row], later: Collection[Row]) -> None:
    """The server really gave numbers of lost events to other events."""
    assert lost, "nothing was lost, so nothing was tested"
    ids, xids = {row.id for row in lost}, {row.xid for row in lost}
    assert ids & {row.id for row in later}, f"no position was given out again: {sorted(ids)[:3]}…"
    assert xids & {row.xid for row in later}, f"no transaction id was given out again: {sorted(xids)[:3]}…"


def of(events: Collection[str], arrivals: Collection[Arrival]) -> list[Arrival]:
    return [arrival for arrival in arrivals if arrival.event_id in events]


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.parametrize("durability", ["Flushed", "Committed"])
def test_a_crash_that_loses_asynchronous_commits(
    durability: str, primary: PostgresServer, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake)
    manifests = [
        outbox_relay(primary.url(), durability=durability),
        subscription("kfake", kafka_sink(kfake.bootstrap, topic), partitions=4),
    ]
    written: list[Row] = []
    lost: list[Row] = []
    with (
        primary,
        Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, topic) as collector,
    ):
        relays = fleet.start_connected(2)
        for round_ in range(4):
            written += write(primary.url(), 150, asynchronous=True)
            # In one round the relays look on until the end. In the next they hold still with what they know in memory,
            # and find another past when they go on.
            still = round_ % 2 == 1
            if still:
                for relay in relays:
                    relay.suspend()
            tail = write(primary.url(), 200, asynchronous=True)
            primary.kill()
            primary.launch()
            survived = in_the_table(primary.url())
            lost_now = [row for row in written + tail if row.event.event_id not in survived and row not in lost]
            lost += lost_now
            written += tail
            later = write(primary.url(), 300)
            written += later
            if still:
                assert_reused(lost_now, later)
                for relay in relays:
                    relay.resume()
            collector.until_all(in_the_table(primary.url()), timeout=60)
        collector.until_quiet()

        truth = in_the_table(primary.url())
        given_up = {row.event.event_id for row in lost}
        assert not given_up & truth.keys()
        if durability == "Flushed":
            found = check_delivery(truth, given_up, collector.arrivals, kills=4)
        else:
            assert {arrival.event_id for arrival in collector.arrivals} <= truth.keys() | given_up
            found = check_delivery(truth, (), of(truth.keys(), collector.arrivals), kills=4, gapless=False)
        print(f"{found}; {len(lost)} commits were lost")  # noqa: T201 - shown with -s


@pytest.mark.timeout(180)
@pytest.mark.parametrize("relays_hold_still", [False, True], ids=["relays-go-on", "relays-hold-still"])
def test_the_promotion_of_a_lagging_standby(
    relays_hold_still: bool, primary: PostgresServer, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake)
    with primary, primary.clone_standby(tmp_path / "standby") as standby:
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        manifests = [
            outbox_relay(url),
            subscription("kfake", kafka_sink(kfake.bootstrap, topic), partitions=4),
        ]
        with (
            Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet,
            KafkaCollector(kfake.bootstrap, topic) as collector,
        ):
            relays = fleet.start_connected(2)
            early = write(primary.url(), 200)
            collector.until_all([row.event.event_id for row in early])
            if relays_hold_still:
                for relay in relays:
                    relay.suspend()
            unseen = write(primary.url(), 60)
            _cut_off(primary, standby)

            tail = write(primary.url(), 300)
            if not relays_hold_still:
                collector.until_all([row.event.event_id for row in tail])
            primary.kill()
            standby.promote()
            survived = in_the_table(standby.url())
            lost = [row for row in tail if row.event.event_id not in survived]
            assert all(row.event.event_id in survived for row in early + unseen)

            later = write(standby.url(), 400)
            assert_reused(lost, later)
            for relay in relays:
                if relays_hold_still:
                    relay.resume()
                relay.until_connected(times=2)
            truth = in_the_table(standby.url())
            collector.until_all(truth, timeout=60)
            collector.until_quiet()

        given_up = {row.event.event_id for row in lost}
        if relays_hold_still:
            assert not of(given_up, collector.arrivals), "published, and never seen"
        assert {arrival.event_id for arrival in collector.arrivals} <= truth.keys() | given_up
        found = check_delivery(truth, (), of(truth.keys(), collector.arrivals), kills=1, gapless=False)
        print(f"{found}; {len(lost)} commits were lost")  # noqa: T201 - shown with -s


def _cut_off(primary: PostgresServer, standby: PostgresServer) -> None:
    """The standby has everything up to here and gets nothing more. (One that is merely paused would catch up before its
    promotion, from the log that it has received.)"""
    (end,) = primary.execute("select pg_current_wal_insert_lsn()::text")[0]
    primary.execute("select pg_switch_wal()")
    replayed = sql.SQL("select pg_last_wal_replay_lsn() >= {}::pg_lsn").format(sql.Literal(end))
    wait_until(lambda: standby.execute(replayed) == [(True,)], 20, "the standby to catch up")
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    wait_until(lambda: not standby.execute("select from pg_stat_wal_receiver"), 20, "the standby to be cut off")
