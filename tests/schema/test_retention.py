"""Retention: a time partition is dropped once all subscriptions are past it, and no writer is delayed (G1, G10)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql

from mailboat.store.connection import PostgresConnection
from mailboat.store.schema.time_partitions import HardLimit, RetentionReport, RetentionSweep, TimePartition, beyond
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from support.databases import migrated_database
from support.pull_consumers import Puller, declare, emit
from support.wait import await_until

OUTBOX = "mailboat.outbox"
NOW = datetime.now(UTC)
MIDNIGHT = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
OLD = MIDNIGHT - timedelta(days=60)
"""The day whose time partition the tests drop."""
NAME = f"mailboat.outbox_p{OLD:%Y%m%d}"


def add_day(database: Database, day: datetime = OLD, events: int = 3) -> str:
    """Add a time partition of the past with events."""
    name = f"mailboat.outbox_p{day:%Y%m%d}"
    with psycopg.connect(database.url) as connection:
        # Not PARTITION OF, which would lock the outbox against the writer of the test.
        connection.execute(f"create table {name} (like mailboat.outbox including all)")
        connection.execute(
            f"alter table mailboat.outbox attach partition {name} for values from ('{day.isoformat()}')"
            f" to ('{(day + timedelta(days=1)).isoformat()}')"
        )
        for number in range(events):
            insert_old(connection, f"k{number}", day)
    return name


def insert_old(connection: psycopg.Connection, key: str = "k", day: datetime = OLD) -> None:
    connection.execute(
        "insert into mailboat.outbox (event_type, key, payload, created_at) values ('old', %s, '{}', %s)",
        (key, day + timedelta(hours=1)),
    )


def subscribe(
    database: Database, name: str, settled_snapshot: str = "pg_current_snapshot()", partitions: int = 2
) -> None:
    """Add a subscription whose cursors have settled everything visible in a snapshot."""
    with psycopg.connect(database.url) as connection:
        cursor = connection.execute(
            "insert into mailboat.subscriptions (outbox, name, partitions) values (%s, %s, %s) returning id",
            (OUTBOX, name, partitions),
        )
        (number,) = cursor.fetchone() or (None,)
        connection.execute(
            "insert into mailboat.cursors (subscription_id, partition, settled_snapshot, system_identifier, timeline)"
            f" select %s, p, {settled_snapshot}, (select system_identifier from pg_control_system()), 1"
            " from generate_series(0, %s - 1) p",
            (number, partitions),
        )


def catch_up(database: Database) -> None:
    database.execute("update mailboat.cursors set settled_snapshot = pg_current_snapshot(), timeline = 1")


def tables(database: Database) -> set[str]:
    rows = database.execute(
        "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname = 'mailboat'"
    )
    return {name for (name,) in rows}


async def sweep(connection: psycopg.AsyncConnection, **changes: Any) -> RetentionReport:
    options: dict[str, Any] = {"older_than": NOW - timedelta(days=30), "now": NOW, "detach_wait": 60} | changes
    return await RetentionSweep(connection, TableLayout(OUTBOX), **options).run()


async def test_only_time_partitions_that_all_subscriptions_passed_are_dropped(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    add_day(outbox)
    young = add_day(outbox, MIDNIGHT - timedelta(days=10))
    subscribe(outbox, "shop/a")
    subscribe(outbox, "shop/b")
    before = tables(outbox)
    assert await sweep(connection) == RetentionReport(dropped=(NAME,))
    assert before - tables(outbox) == {NAME}
    assert young in tables(outbox)
    assert await sweep(connection) == RetentionReport()


async def test_an_outbox_without_subscriptions_keeps_nothing(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    add_day(outbox)
    assert (await sweep(connection)).dropped == (NAME,)


async def test_undelivered_events_hold_their_time_partition_and_the_report_names_the_subscription(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    add_day(outbox)
    subscribe(outbox, "shop/quick")
    subscribe(outbox, "shop/slow", settled_snapshot="'1:1:'")
    report = await sweep(connection)
    assert [str(blocked) for blocked in report.blocked] == [
        f"{NAME}: subscription shop/slow has not delivered all of it"
    ]
    assert NAME in tables(outbox)
    catch_up(outbox)
    assert (await sweep(connection)).dropped == (NAME,)


async def test_events_not_pulled_by_a_stopped_consumer_are_kept_until_the_hard_limit(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    """A consumer that returns after the limit continues with the remaining events, without an error."""
    add_day(outbox, events=5)
    await asyncio.to_thread(declare, outbox)
    consumer = Puller(outbox.url)
    assert len(await asyncio.to_thread(consumer.take, 2)) == 2  # stops in the middle of a window
    report = await sweep(connection)
    assert [str(each) for each in report.blocked] == [f"{NAME}: subscription shop/view has not delivered all of it"]
    emit(outbox, "k-new")
    report = await sweep(connection, limit=HardLimit(older_than=OLD + timedelta(days=1)))
    assert report.dropped == (NAME,)
    assert [(lost.subscription, lost.events) for lost in report.lost] == [("shop/view", 3)]
    assert await asyncio.to_thread(consumer.take_all) == ["k-new"]
    consumer.close()
    assert (await sweep(connection)).blocked == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("previous_layout = '[]'", "is being repartitioned"),
        ("system_identifier = 1", "belongs to another database system"),
        ("timeline = 7", "was not moved since a failover"),
    ],
)
async def test_a_cursor_that_can_not_be_compared_holds(
    outbox: Database, connection: psycopg.AsyncConnection, change: str, reason: str
) -> None:
    add_day(outbox)
    subscribe(outbox, "shop/a")
    outbox.execute(sql.Composed([sql.SQL("update mailboat.cursors set "), sql.SQL(change)]))
    (blocked,) = (await sweep(connection)).blocked
    assert blocked.reason.startswith(reason)


async def test_a_transaction_that_was_open_when_the_last_event_was_settled_holds_nothing(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    with psycopg.connect(outbox.url) as bystander:
        bystander.execute("select pg_current_xact_id()")
        add_day(outbox)
        subscribe(outbox, "shop/a")  # its snapshot has the bystander as xmin, below the events
        assert (await sweep(connection)).dropped == (NAME,)


async def test_an_insert_in_flight_holds_its_partition(outbox: Database, connection: psycopg.AsyncConnection) -> None:
    add_day(outbox)
    subscribe(outbox, "shop/a")
    with psycopg.connect(outbox.url) as late:
        insert_old(late)
        (blocked,) = (await sweep(connection)).blocked
        assert "a transaction in flight has written to it" in blocked.reason
        late.commit()
    (blocked,) = (await sweep(connection)).blocked
    assert blocked.subscription == "shop/a"


async def test_an_insert_that_commits_while_its_lock_is_waited_for_holds_its_partition(outbox: Database) -> None:
    """Independent of the default isolation of the database (G1). With an earlier snapshot the event would be lost."""
    add_day(outbox)
    subscribe(outbox, "shop/a")
    name = sql.Identifier(outbox.name)
    outbox.execute(sql.SQL("alter database {} set default_transaction_isolation = 'repeatable read'").format(name))
    link = await PostgresConnection.open(lambda: outbox.url, "maintenance")
    with psycopg.connect(outbox.url) as late:
        insert_old(late)
        sweeping = asyncio.create_task(sweep(link.connection, lock_wait=60))
        waiting = "select true from pg_locks where not granted and mode = 'ShareLock' and locktype = 'relation'"
        await await_until(lambda: outbox.execute(waiting), what="the sweep to wait for the insert")
        late.commit()
    report = await sweeping
    await link.close()
    assert [blocked.subscription for blocked in report.blocked] == ["shop/a"]
    assert not report.dropped


@pytest.fixture
def two_phase_outbox(tmp_path: Path) -> Iterator[Database]:
    """Outbox on a separate server, since the shared servers do not allow two-phase commit."""
    settings = {"max_prepared_transactions": "5", "fsync": "off"}
    with PostgresServer.start(find_postgres(NEWEST), tmp_path / "server", settings=settings) as server:
        yield from migrated_database(server)


async def test_a_prepared_transaction_holds_its_partition_too(two_phase_outbox: Database) -> None:
    add_day(two_phase_outbox)
    with psycopg.connect(two_phase_outbox.url) as late:
        insert_old(late)
        late.execute("prepare transaction 'late'")
    async with await psycopg.AsyncConnection.connect(two_phase_outbox.url, autocommit=True) as connection:
        (blocked,) = (await sweep(connection)).blocked
        assert "a transaction in flight has written to it" in blocked.reason
        await connection.execute("rollback prepared 'late'")
        assert (await sweep(connection)).dropped == (NAME,)


@pytest.mark.parametrize(
    "limit",
    [HardLimit(), HardLimit(older_than=NOW + timedelta(days=400)), HardLimit(max_bytes=0)],
    ids=["hold", "by age", "by size"],
)
async def test_a_relay_whose_clock_is_ahead_drops_no_day_that_may_be_written_to(
    outbox: Database, connection: psycopg.AsyncConnection, writer: Any, limit: HardLimit
) -> None:
    add_day(outbox)
    ahead = NOW + timedelta(days=400)
    report = await sweep(connection, older_than=ahead, now=ahead, limit=limit)
    assert NAME in report.dropped
    today = f"mailboat.outbox_p{datetime.now(UTC):%Y%m%d}"  # read now, since midnight may have passed after the import
    assert max(report.dropped) < today, "only what is over by the server's clock"
    await asyncio.to_thread(writer.writes_on)


# ---- no writer is disturbed ---------------------------------------------------------------------------------------


async def hold_open(database: Database, statement: str) -> psycopg.AsyncConnection:
    holder = await psycopg.AsyncConnection.connect(database.url)
    await holder.execute(statement)
    return holder


@pytest.mark.parametrize(
    "statement",
    ["select count(*) from mailboat.outbox", "insert into mailboat.outbox (event_type) values ('idle in transaction')"],
    ids=["open reader", "idle writer"],
)
async def test_retention_under_an_open_transaction_delays_no_writer(
    outbox: Database, connection: psycopg.AsyncConnection, writer: Any, statement: str
) -> None:
    add_day(outbox)
    async with await hold_open(outbox, statement):
        reports: list[RetentionReport] = []

        async def begun() -> bool:  # on a busy machine half a second may not be enough
            reports.append(await sweep(connection, detach_wait=0.5))
            return outbox.execute("select true from pg_inherits where inhdetachpending") == [(True,)]

        assert await await_until(begun, what="the detach to be pending")
        report = reports[-1]
        assert not report.dropped
        assert [blocked.partition for blocked in report.blocked] == [NAME]
        assert "will be finished later" in report.blocked[0].reason
        await asyncio.to_thread(writer.writes_on)
        # A transaction that did not read the old time partition does not block it.
        idle = "idle in transaction" in statement
        again = await sweep(connection, detach_wait=60 if idle else 0.5)
        assert bool(again.dropped) == idle
        await asyncio.to_thread(writer.writes_on)
        assert outbox.execute("select mailboat.ensure_partitions('mailboat.outbox', '33 days')") == [(3,)]
        await asyncio.to_thread(writer.writes_on)
    assert (*again.dropped, *(await sweep(connection)).dropped) == (NAME,)
    assert NAME not in tables(outbox)
    await asyncio.to_thread(writer.writes_on)


async def test_a_relay_that_dies_in_the_middle_of_a_detach_is_succeeded(
    outbox: Database, connection: psycopg.AsyncConnection, writer: Any
) -> None:
    add_day(outbox)
    next_day = add_day(outbox, OLD + timedelta(days=1))
    async with await hold_open(outbox, "select count(*) from mailboat.outbox"):
        dying = await psycopg.AsyncConnection.connect(outbox.url, autocommit=True)
        task = asyncio.create_task(sweep(dying, detach_wait=60))
        await await_until(
            lambda: outbox.execute("select true from pg_inherits where inhdetachpending") == [(True,)],
            what="the detach to be pending",
        )
        await asyncio.to_thread(writer.writes_on)
        await connection.execute("select pg_terminate_backend(%s)", (dying.info.backend_pid,))
        with pytest.raises(Exception, match="terminating connection"):
            await task
        await dying.close()
        await asyncio.to_thread(writer.writes_on)
    assert (await sweep(connection)).dropped == (NAME, next_day)
    await asyncio.to_thread(writer.writes_on)


async def test_own_detached_partitions_are_dropped_later(outbox: Database, connection: psycopg.AsyncConnection) -> None:
    theirs = add_day(outbox, OLD + timedelta(days=1))
    add_day(outbox)
    await connection.execute(f"comment on table {NAME} is 'mailboat: expired, being dropped'")
    for name in (NAME, theirs):
        await connection.execute(f"alter table mailboat.outbox detach partition {name}")
    assert (await sweep(connection)).dropped == (NAME,)
    assert theirs in tables(outbox)


async def test_a_session_that_reads_a_detached_partition_delays_only_its_drop(
    outbox: Database, connection: psycopg.AsyncConnection, writer: Any
) -> None:
    add_day(outbox)
    await connection.execute(f"comment on table {NAME} is 'mailboat: expired, being dropped'")
    await connection.execute(f"alter table mailboat.outbox detach partition {NAME} concurrently")
    async with await hold_open(outbox, f"select from {NAME}"):
        (blocked,) = (await sweep(connection)).blocked
        assert "detached" in blocked.reason
        await asyncio.to_thread(writer.writes_on)
    assert (await sweep(connection)).dropped == (NAME,)


async def test_two_relays_at_once_do_it_once(outbox: Database, writer: Any) -> None:
    days = {add_day(outbox, OLD + timedelta(days=number)) for number in range(3)}

    async def relay() -> RetentionReport:
        async with await psycopg.AsyncConnection.connect(outbox.url, autocommit=True) as connection:
            return await sweep(connection)

    reports = await asyncio.gather(relay(), relay())
    dropped = [name for report in reports for name in report.dropped]
    assert len(dropped) == len(set(dropped))
    assert days - set((await relay()).dropped) - set(dropped) == set()
    assert not days & tables(outbox)


# ---- policy Drop --------------------------------------------------------------------------------------------------


async def test_a_hard_limit_by_age_drops_events_and_reports_the_loss(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    add_day(outbox, events=5)
    younger = add_day(outbox, OLD + timedelta(days=2))
    subscribe(outbox, "shop/quick")
    subscribe(outbox, "shop/slow", settled_snapshot="'1:1:'")
    limit = HardLimit(older_than=OLD + timedelta(days=1))
    report = await sweep(connection, limit=limit, count_up_to=4)
    assert report.dropped == (NAME,)
    assert [(lost.subscription, lost.partition) for lost in report.lost] == [("shop/slow", NAME)]
    assert (report.lost[0].events, report.lost[0].at_least) == (4, True)
    assert [blocked.partition for blocked in report.blocked] == [younger]


async def test_events_settled_inside_an_open_window_are_not_counted_as_lost(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    add_day(outbox, events=5)
    subscribe(outbox, "shop/slow", settled_snapshot="'1:1:'", partitions=1)
    outbox.execute(
        "update mailboat.cursors set window_snapshot = pg_current_snapshot(),"
        " position = (select id from mailboat.outbox order by id limit 1 offset 1)"
    )
    report = await sweep(connection, limit=HardLimit(older_than=OLD + timedelta(days=1)))
    assert [(lost.events, lost.at_least) for lost in report.lost] == [(3, False)]


async def test_a_hard_limit_by_size_gives_up_the_oldest_until_it_fits(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    names = [add_day(outbox, MIDNIGHT - timedelta(days=days)) for days in (4, 3, 2)]
    subscribe(outbox, "shop/slow", settled_snapshot="'1:1:'")
    ((total,),) = outbox.execute(
        "select sum(pg_total_relation_size(inhrelid)) from pg_inherits where inhparent = 'mailboat.outbox'::regclass"
    )
    report = await sweep(connection, limit=HardLimit(max_bytes=int(total) - 1))
    assert report.dropped == (names[0],)
    assert [lost.events for lost in report.lost] == [3]


async def test_a_user_that_is_not_the_owner_gets_an_error(outbox: Database) -> None:
    add_day(outbox)
    role = f"relay_{outbox.name}"
    with psycopg.connect(outbox.url) as admin:
        admin.execute(sql.SQL("create role {} login in role mailboat_relay").format(sql.Identifier(role)))
    try:
        async with await psycopg.AsyncConnection.connect(outbox.url_for(role), autocommit=True) as connection:
            (blocked,) = (await sweep(connection)).blocked
        assert "is not its owner" in blocked.reason
        assert NAME in tables(outbox)
    finally:
        outbox.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


async def test_a_connection_in_a_transaction_is_refused(outbox: Database) -> None:
    async with await psycopg.AsyncConnection.connect(outbox.url) as connection:
        with pytest.raises(ValueError, match="autocommit"):
            await sweep(connection)


# ---- the decision about a hard limit ------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 100), max_size=12),
    future=st.integers(0, 3),
    max_bytes=st.none() | st.integers(0, 600),
    age=st.none() | st.integers(0, 12),
)
def test_a_hard_limit_gives_up_a_stretch_of_the_oldest_and_no_more_than_needed(
    sizes: list[int], future: int, max_bytes: int | None, age: int | None
) -> None:
    first = MIDNIGHT - timedelta(days=max(len(sizes) - future, 0))
    partitions = [
        TimePartition(f"p{n}", first + timedelta(days=n), first + timedelta(days=n + 1), False, False, size)
        for n, size in enumerate(sizes)
    ]
    older_than = None if age is None else MIDNIGHT - timedelta(days=age)
    gone = beyond(HardLimit(older_than, max_bytes), partitions, MIDNIGHT)

    names = [partition.name for partition in partitions]
    assert gone == set(names[: len(gone)]), "the oldest go first"
    kept = [partition for partition in partitions if partition.name not in gone]
    assert all(p.upper <= MIDNIGHT for p in partitions if p.name in gone), "what may be written to stays"
    if older_than is not None:
        assert not [p for p in kept if p.upper <= min(older_than, MIDNIGHT)]
    if max_bytes is not None:
        assert sum(p.bytes for p in kept) <= max_bytes or not [p for p in kept if p.upper <= MIDNIGHT]
    if gone:
        last = partitions[len(gone) - 1]
        by_age = older_than is not None and last.upper <= older_than
        by_size = max_bytes is not None and sum(p.bytes for p in kept) + last.bytes > max_bytes
        assert by_age or by_size, "the last one given up had to be"


def test_without_a_hard_limit_nothing_is_given_up() -> None:
    assert beyond(HardLimit(), [TimePartition("p", OLD, OLD + timedelta(days=1), False, False, 10)], NOW) == frozenset()
