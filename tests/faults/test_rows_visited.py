"""Cost of polls over three million retained rows: a small multiple of the rows that the poll returns.

The server counts index entries returned and rows read by sequential scans, over all time partitions of the outbox, for
the statements of a relay. The cases: an empty tail, a tail of a hundred rows, a large window, a resumed window, a
transaction held open, stale statistics, and generic plans. Every case has thirty time partitions. Further cases are the
lag query and the retention check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from mailboat.store.outbox_store import Cursor, CursorGroup, CursorKey, Settlement, TickResult, Window
from mailboat.store.postgres import PostgresStore
from mailboat.store.schema.migrate import apply_migrations
from mailboat.store.schema.time_partitions import RetentionSweep
from mailboat.store.settings import ReadLimits, RelayIdentity, StoreSettings
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST, OLDEST
from mailboat_spec import EventSubscription
from support.relay_processes import subscription
from support.store_relays import ticked
from support.wait import await_until

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

RETAINED = 3_000_000
DAYS = 30
LIMITS = ReadLimits()
BOUND = 10_000
"""Highest lag that a lag query counts."""
PLANNING = 70
"""Index entries that planning a statement reads: at most one at an end of each time partition's index."""

_DAYS_GONE = """
    do $$
    declare
        day date;
    begin
        for n in 1..30 loop
            day := (now() at time zone 'UTC')::date - n;
            continue when to_regclass(to_char(day, '"mailboat.outbox_p"YYYYMMDD')) is not null;
            execute format('create table mailboat.%I partition of mailboat.outbox for values from (%L) to (%L)',
                           to_char(day, '"outbox_p"YYYYMMDD'), day::timestamptz, (day + 1)::timestamptz);
        end loop;
    end
    $$"""
_BURN = """
    create procedure burn(transactions integer) language plpgsql as $$
    begin
        for n in 1..transactions loop
            perform pg_current_xact_id();
            commit;
        end loop;
    end
    $$"""
_FILL = """
    insert into mailboat.outbox (id, xid, created_at, event_type, key, payload)
    select n, (1000 + n / 10)::text::xid8, today - interval '30 days' + interval '30 days' * ((n - 1) / 3000000.0),
           'order.placed', 'key ' || n % 1000, '{"amount": 1}'
    from date_trunc('day', now(), 'UTC') as today, generate_series(1, 3000000) as n"""
_VISITED = """
    select (select sum(idx_tup_read) from pg_stat_user_indexes where relname ~ '^outbox_p'),
           (select sum(seq_tup_read) from pg_stat_user_tables where relname ~ '^outbox_p')"""
_COUNTS_AT_ONCE = 15
"""The first major version without a statistics collector process. The collector publishes counts every half second."""
_TOLD_WITHIN = 0.7
_SESSIONS = "select count(*) from pg_stat_activity where application_name ~ '^mailboat '"
_PARTITIONS = "relnamespace = 'mailboat'::regnamespace and relname ~ '^outbox(_p\\d+)?$' and relkind in ('r', 'p')"
_FORGET_STATISTICS = f"""
    with forgotten as (delete from pg_statistic where starelid in (select oid from pg_class where {_PARTITIONS}))
    update pg_class set relpages = 0, reltuples = -1 where {_PARTITIONS}"""
_STATISTICS_OF_AN_EMPTY_TABLE = f"update pg_class set reltuples = 0 where {_PARTITIONS} and relkind = 'r'"


@pytest.fixture(scope="module", params=[NEWEST, OLDEST])
def filled(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    or_skip: Callable[[Callable[[], PostgresServer]], PostgresServer],
) -> Iterator[Database]:
    """Outbox with thirty days of a hundred thousand events each, ten per transaction, and no events today."""
    settings = {"max_wal_size": "8GB", "shared_buffers": "512MB", "autovacuum": "off", "checkpoint_timeout": "1h"}
    directory = tmp_path_factory.mktemp("millions")
    with or_skip(lambda: PostgresServer.start(find_postgres(request.param), directory, settings=settings)) as server:
        server.create_database("shop")
        asyncio.run(_migrate(server.url("shop")))
        with psycopg.connect(server.url("shop"), autocommit=True) as connection:
            connection.execute("set synchronous_commit = off")
            connection.execute(_DAYS_GONE)
            connection.execute(_BURN)
            connection.execute("call burn(301000)")  # provides the transaction ids that the events refer to
            connection.execute(_FILL)
            connection.execute("select setval('mailboat.outbox_id_seq', 3000000)")
        yield Database(server, "shop")


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await apply_migrations(connection, "mailboat.outbox")


@pytest.fixture(params=["never analyzed", "analyzed when empty", "analyzed"])
def outbox(request: pytest.FixtureRequest, filled: Database) -> Iterator[Database]:
    """The filled outbox with one of three kinds of statistics. The fixture restores it after the test."""
    if request.param == "analyzed":
        filled.execute("analyze mailboat.outbox")
    else:
        filled.execute(_FORGET_STATISTICS)
        if request.param == "analyzed when empty":
            filled.execute(_STATISTICS_OF_AN_EMPTY_TABLE)
    yield filled
    filled.execute("delete from mailboat.subscriptions")
    today = filled.execute(
        "select distinct tableoid::regclass::text from mailboat.outbox"
        " where id > 3000000 and created_at > now() - interval '1 hour'"
    )
    for (partition,) in today:
        filled.execute(sql.SQL("truncate {}").format(sql.Identifier(*partition.split("."))))


@dataclass
class Look:
    """The store of a relay that owns the only partition of the only subscription."""

    store: PostgresStore
    cursor: Cursor

    async def tick(self, *settlements: Settlement, settled_snapshot: str | None = None) -> TickResult:
        """Settle, and poll for new events."""
        return await ticked(
            self.store,
            settlements,
            [CursorGroup(settled_snapshot or self.cursor.settled_snapshot, (self.cursor.lease,))],
        )

    async def close_window(self, window: Window) -> None:
        """Close a window as if all of its events had been delivered."""
        settlement = Settlement(self.cursor.lease, window.window_snapshot, 0, 0, closes=True)
        assert not (await self.store.tick([settlement], [])).lost
        self.cursor = replace(self.cursor, settled_snapshot=window.window_snapshot, window=None)

    async def read_whole(self, window: Window, after: int = 0) -> int:
        """Read a window from its beginning or from a position on, and return the number of its events."""
        events, last = 0, False
        while not last:
            chunk = await self.store.read(window, [self.cursor.lease], after)
            events += len(chunk.events.get(self.cursor.lease.key, ()))
            after, last = chunk.reached, chunk.last
        return events


@dataclass
class Bench:
    """One subscription without a relay process, and a count of the rows that the server visited."""

    database: Database
    start: str
    visited: int = 0

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[Look]:
        """Open the store without counting."""
        me = RelayIdentity("bench", str(uuid4()))
        store = await PostgresStore.open(lambda: self.database.url, me, StoreSettings(limits=LIMITS, lag_bound=BOUND))
        try:
            [number] = await store.declare([_subscription(self.start)])
            await store.join()
            [cursor] = await store.claim([CursorKey(number, 0)])
            yield Look(store, cursor)
        finally:
            await store.close(leave=True)

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[Look]:
        """Add the visited entries of the block to ``visited``. A sequential scan of events fails the test."""
        before, scanned_before = await self._counters()
        async with self.looking() as look:
            yield look
        after, scanned = await self._counters()
        assert scanned == scanned_before, f"{scanned - scanned_before} rows were read by sequential scans"
        self.visited += after - before

    async def _counters(self) -> tuple[int, int]:
        """Return index entries and rows read so far.

        Counts are complete after their sessions have ended. Servers before `_COUNTS_AT_ONCE` publish them later.
        """
        await await_until(lambda: self.database.execute(_SESSIONS) == [(0,)], what="the sessions to end")
        counted, since = self.database.execute(_VISITED), time.monotonic()
        patience = 0.0 if self.database.server.binaries.major >= _COUNTS_AT_ONCE else _TOLD_WITHIN

        def nothing_new() -> bool:
            nonlocal counted, since
            if (now := self.database.execute(_VISITED)) != counted:
                counted, since = now, time.monotonic()
            return time.monotonic() - since >= patience

        await await_until(nothing_new, what="all counts to be told")
        [(entries, rows)] = counted
        return int(entries), int(rows)


def _subscription(start: str) -> EventSubscription:
    manifest = subscription("orders", {"log": {}}, partitions=1, start={"from": start})
    return EventSubscription.model_validate(manifest)


@pytest.fixture
def at_head(outbox: Database) -> Bench:
    """Subscription with all existing events settled."""
    return Bench(outbox, "Latest")


@pytest.fixture
def at_start(outbox: Database) -> Bench:
    """Subscription with no event settled."""
    return Bench(outbox, "Earliest")


def _write(database: Database, events: int) -> None:
    with psycopg.connect(database.url) as connection:
        connection.execute(
            "insert into mailboat.outbox (event_type, key, payload)"
            " select 'order.placed', 'key ' || n %% 100, '{}' from generate_series(1, %s) as n",
            [events],
        )


def test_there_are_thirty_days_of_events(filled: Database) -> None:
    [(rows, days)] = filled.execute("select count(*), count(distinct tableoid) from mailboat.outbox")
    assert rows >= RETAINED
    assert days >= DAYS


async def test_an_empty_tail_costs_nothing_however_often_it_is_polled(at_head: Bench) -> None:
    async with at_head.counting() as look:
        for _ in range(100):
            assert (await look.tick()).quiet
    assert at_head.visited <= 8 * PLANNING


async def test_a_tail_of_a_hundred_costs_a_hundred(at_head: Bench) -> None:
    async with at_head.counting() as look:
        await look.tick()
        for _ in range(10):  # the last rounds use prepared statements and the generic plan that a relay sets
            _write(at_head.database, 100)
            [opened] = (await look.tick()).opened
            assert opened.events is not None
            assert sum(map(len, opened.events.values())) == 100
            await look.close_window(opened.window)
    assert at_head.visited <= 10 * 100 + 8 * PLANNING


async def test_a_large_window_costs_a_small_multiple_of_its_events(at_head: Bench) -> None:
    async with at_head.looking() as look:
        assert (await look.tick()).quiet
    _write(at_head.database, 20_000)
    async with at_head.counting() as look:
        [opened] = (await look.tick()).opened
        assert opened.events is None
        assert await look.read_whole(opened.window) == 20_000
    # One pass finds the ends of the window, the walk takes two, and one read stops because the window is too large.
    assert at_head.visited <= 3 * 20_000 + LIMITS.small_rows + 40 * PLANNING


@pytest.mark.parametrize("events", [100, 20_000], ids=["small", "large"])
async def test_a_resumed_window_reads_only_its_remaining_rows(at_head: Bench, events: int) -> None:
    async with at_head.looking() as look:
        assert (await look.tick()).quiet
        _write(at_head.database, events)
        [opened] = (await look.tick()).opened
    [(first,)] = at_head.database.execute("select min(id) from mailboat.outbox where id > 3000000")
    left = events // 10
    async with at_head.counting() as look:
        assert look.cursor.window is not None
        assert look.cursor.window.window_snapshot == opened.window.window_snapshot
        assert await look.read_whole(look.cursor.window, after=first + events - left - 1) == left
    small = opened.window.highest is None  # a small window is read again as a whole
    assert at_head.visited <= (events if small else 2 * left) + 8 * PLANNING


async def test_a_subscription_from_the_beginning_pays_for_all_of_it_once(at_start: Bench) -> None:
    async with at_start.counting() as look:
        [opened] = (await look.tick()).opened
    assert (opened.window.lowest, opened.window.highest) == (1, RETAINED)
    assert at_start.visited <= RETAINED + LIMITS.small_rows + 8 * PLANNING
    for after in (0, 1_500_000, 2_900_000):
        at_start.visited = 0
        async with at_start.counting() as look:
            assert look.cursor.window is not None
            chunk = await look.store.read(look.cursor.window, [look.cursor.lease], after)
        assert chunk.reached == after + LIMITS.rows
        assert at_start.visited <= 2 * LIMITS.rows + 8 * PLANNING


async def test_a_transaction_held_open_makes_nothing_dearer(at_head: Bench) -> None:
    async with at_head.looking() as look:
        assert (await look.tick()).quiet
    with psycopg.connect(at_head.database.url) as held:
        held.execute("insert into mailboat.outbox (event_type) values ('order.late')")
        _write(at_head.database, 100)
        async with at_head.counting() as look:
            [opened] = (await look.tick()).opened
            await look.close_window(opened.window)
            for _ in range(100):
                assert (await look.tick()).quiet
            held.commit()
            [late] = (await look.tick()).opened
    assert late.events is not None
    assert [len(events) for events in late.events.values()] == [1]
    assert at_head.visited <= 100 + 10 * PLANNING


async def test_an_old_transaction_in_a_large_window_causes_no_scan_of_settled_rows(at_head: Bench) -> None:
    async with at_head.looking() as look:
        assert (await look.tick()).quiet
        with psycopg.connect(at_head.database.url) as held:
            held.execute("insert into mailboat.outbox (event_type) values ('order.late')")
            _write(at_head.database, 50_000)
            [opened] = (await look.tick()).opened
            await look.close_window(opened.window)
            held.commit()
    _write(at_head.database, 5_000)
    async with at_head.counting() as look:
        [opened] = (await look.tick()).opened
        assert await look.read_whole(opened.window) == 5_001
    assert at_head.visited <= 3 * 5_000 + LIMITS.small_rows + 20 * PLANNING


@pytest.mark.parametrize("behind", [0, 100, RETAINED])
async def test_lag_is_counted_up_to_a_bound(outbox: Database, behind: int) -> None:
    """Guarantee G7 up to the bound of the lag query."""
    bench = Bench(outbox, "Earliest" if behind == RETAINED else "Latest")
    async with bench.looking():
        pass  # declares the subscription
    if 0 < behind < RETAINED:
        _write(outbox, behind)
    async with bench.counting() as look:
        lags = [(await look.store.backlog(look.cursor.lease.key.subscription)).partitions.get(0) for _ in range(3)]
    assert [lag.pending if lag else 0 for lag in lags] == [min(behind, BOUND)] * 3
    assert bench.visited <= 3 * min(behind, BOUND) + 8 * PLANNING


@pytest.mark.parametrize("start", ["Earliest", "Latest"])
async def test_retention_finds_the_subscriptions_that_need_a_day_without_a_scan(outbox: Database, start: str) -> None:
    bench = Bench(outbox, start)
    with psycopg.connect(outbox.url) as held:
        # A transaction was open when the last event was settled, as on a busy server. The transaction also prevents the
        # drop of time partitions that the next tests need.
        held.execute("select pg_current_xact_id()")
        held.execute("lock table mailboat.outbox in row exclusive mode")
        _write(outbox, 10)
        now = datetime.now(UTC)
        async with bench.counting(), await psycopg.AsyncConnection.connect(outbox.url, autocommit=True) as connection:
            expired = now - timedelta(days=DAYS - 5)
            report = await RetentionSweep(connection, TableLayout(), expired, now=now, lock_wait=0.01).run()
    assert len(report.blocked) >= 4
    assert {blocked.reason for blocked in report.blocked} == {
        "has not delivered all of it"
        if start == "Earliest"
        else "a transaction in flight has written to it, or it is being vacuumed"
    }
    assert bench.visited <= 20 * PLANNING
