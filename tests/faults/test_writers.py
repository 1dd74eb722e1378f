"""Guarantees G10 and G8.

G10: no business transaction fails or waits because of relays, listeners or time partitions. G8: an idle relay writes
only its heartbeat.

Every writer has a lock timeout of two seconds. Writers may wait for each other for part of it on a busy disk.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from mailboat.store.schema.time_partitions import drop_expired
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from support.databases import migrated_database
from support.inprocess_relay import STAGED, StagedSink, events, serving, status_of, write
from support.ledger import Written, check_delivery, payload
from support.relay_processes import Fleet, outbox_relay, subscription
from support.wait import await_until, wait_until

Stage = dict[str, StagedSink]
OrSkip = Callable[[Callable[[], PostgresServer]], PostgresServer]


SLOWEST = 60.0
"""Longest transaction in seconds. A commit has no timeout; the bound leaves room for a busy machine."""


class Writers:
    """Applications that write continuously, one key each. A failed statement of a writer fails the test."""

    def __init__(self, url: str, count: int = 4) -> None:
        self.committed: dict[str, Written] = {}
        self.slowest = 0.0
        """Seconds that the slowest transaction took."""
        self._url = url
        self._failures: list[BaseException] = []
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(f"writer {n}",)) for n in range(count)]

    @property
    def written(self) -> int:
        return len(self.committed)

    def goes_on(self, events: int = 50) -> None:
        """Wait until more events are written."""
        goal = self.written + events
        wait_until(
            lambda: self.written >= goal or self._failures, timeout=60 + events / 50, what="the writers to go on"
        )
        self._check()

    @contextmanager
    def writing(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join()
        self._check()

    def _check(self) -> None:
        assert not self._failures, f"a writer was hurt: {self._failures[0]!r}"
        assert self.slowest < SLOWEST, f"a transaction took {self.slowest:.1f} s"

    def _write(self, key: str) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute("set lock_timeout = '2s'")
                connection.execute("set statement_timeout = '60s'")
                number = 0
                while not self._ending.is_set():
                    number += 1
                    event = Written(str(uuid.uuid4()), key, number, payload(key, number))
                    began = time.monotonic()
                    connection.execute(
                        "select mailboat.emit('order.placed', %s::bytea, key => %s, event_id => %s::uuid)",
                        [event.payload, key, event.event_id],
                    )
                    self.slowest = max(self.slowest, time.monotonic() - began)
                    self.committed[event.event_id] = event
                    self._ending.wait(0.002)
        except BaseException as error:
            self._failures.append(error)


# ---- the notification queue -----------------------------------------------------------------------------------------


@pytest.fixture
def crowded(tmp_path: Path, or_skip: OrSkip) -> Iterator[Database]:
    """A server whose notification queue is so small (half a megabyte) that a stuck listener can fill it."""
    settings = {"max_notify_queue_pages": "64", "fsync": "off"}  # the server is never crashed
    with or_skip(
        lambda: PostgresServer.start(find_postgres(NEWEST), tmp_path / "crowded", settings=settings)
    ) as server:
        yield from migrated_database(server)


def _sleep_well(database: Database) -> None:
    """Register an idle relay whose lease never ends."""
    database.execute(
        "insert into mailboat.relays (id, incarnation, outbox, session_lock, beat_at, expires_at)"
        " values ('asleep', gen_random_uuid(), 'mailboat.outbox', true, now(), 'infinity')"
    )
    database.execute(
        "insert into mailboat.wakeup_requests (relay, outbox, active) values ('asleep', 'mailboat.outbox', true)"
    )


@pytest.mark.verify
def test_a_stuck_listener_and_a_queue_that_fills_up_fail_no_commit(crowded: Database) -> None:
    _sleep_well(crowded)
    with psycopg.connect(crowded.url) as stuck, psycopg.connect(crowded.url, autocommit=True) as writer:
        stuck.execute("listen mailboat")
        stuck.commit()
        stuck.execute("select 1")  # a listener in a transaction receives no notifications
        writer.execute("set lock_timeout = '2s'")
        for _ in range(200):
            _emit(writer)
        used = _usage(writer)
        assert used > 0, "no notification was sent"
        # Another session fills the queue. From then on, `emit` must not need room in the queue.
        with psycopg.connect(crowded.url, autocommit=True) as other:
            wait_until(lambda: _is_full(other), timeout=60, what="the queue to be full")
        assert _usage(writer) > 0.9
        for _ in range(200):
            _emit(writer)
        assert crowded.execute("select count(*) from mailboat.outbox") == [(400,)]


def test_ringing_stops_long_before_the_queue_is_full(crowded: Database) -> None:
    _sleep_well(crowded)
    with psycopg.connect(crowded.url) as stuck, psycopg.connect(crowded.url, autocommit=True) as writer:
        stuck.execute("listen mailboat")
        stuck.commit()
        stuck.execute("select 1")
        for _ in range(4_000):
            _emit(writer)
        assert 0 < _usage(writer) <= 0.15


@pytest.mark.verify
def test_a_relay_that_stands_still_in_its_sleep_hurts_no_writer(crowded: Database, tmp_path: Path) -> None:
    log = tmp_path / "arrived.jsonl"
    manifests = [outbox_relay(crowded.url), subscription("orders", {"log": {"path": str(log)}}, partitions=2)]
    writers = Writers(crowded.url)
    with Fleet(tmp_path / "fleet", manifests, timings=None) as fleet:
        [relay] = fleet.start_connected(1)
        asleep = "select active from mailboat.wakeup_requests"
        wait_until(lambda: crowded.execute(asleep) == [(True,)], 30, "the relay to sleep")
        relay.suspend()
        with writers.writing():
            # The wake-up request stays active, so every writer sends a NOTIFY that the relay does not receive.
            writers.goes_on(3_000)
            assert crowded.execute(asleep) == [(True,)]
            [(usage,)] = crowded.execute("select pg_notification_queue_usage()")
            assert usage <= 0.15
            relay.resume()
            writers.goes_on(100)

        def all_arrived() -> bool:
            text = log.read_text()
            return all(event_id in text for event_id in writers.committed)

        wait_until(all_arrived, 60, "all events, once the relay goes on")


def _is_full(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Add to the queue, and return True if it was full."""
    try:
        connection.execute(
            "select pg_notify('other', repeat('x', 7000) || n || random()) from generate_series(1, 10) n"
        )
    except psycopg.errors.ProgramLimitExceeded:
        return True
    return False


def _emit(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    connection.execute("select mailboat.emit('order.placed', '{}'::jsonb)")


def _usage(connection: psycopg.Connection[tuple[object, ...]]) -> float:
    row = connection.execute("select pg_notification_queue_usage()").fetchone()
    assert row is not None
    return float(str(row[0]))


# ---- retention, and relays that die ---------------------------------------------------------------------------------


async def test_retention_under_an_open_reader_is_given_up_rather_than_waited_for(outbox: Database) -> None:
    [(oldest,)] = outbox.execute("select min(relname) from pg_class where relname ~ '^outbox_p' and relkind = 'r'")
    writers = Writers(outbox.url)
    with writers.writing(), psycopg.connect(outbox.url) as reader:
        reader.execute("select count(*) from mailboat.outbox")  # its transaction stays open
        writers.goes_on()
        soon = datetime.now(UTC) + timedelta(seconds=1)
        async with await psycopg.AsyncConnection.connect(outbox.url, autocommit=True) as connection:
            # `detach_wait` exceeds the lock timeout of the writers: if they had to wait for the detach, one would fail.
            report = await drop_expired(connection, TableLayout(), soon, now=soon, detach_wait=4.0)
            assert report.dropped == ()
            assert [blocked.partition for blocked in report.blocked] == [f"mailboat.{oldest}"]
            writers.goes_on()
            reader.rollback()
            report = await drop_expired(connection, TableLayout(), soon, now=soon, detach_wait=60)
            assert report.dropped == (f"mailboat.{oldest}",)
        writers.goes_on()


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_relays_that_die_in_the_middle_of_anything_hurt_no_writer(outbox: Database, tmp_path: Path) -> None:
    sink = {"log": {"path": str(tmp_path / "arrived.jsonl")}}
    orders = subscription("orders", sink, partitions=8)
    chance = random.Random(7)
    writers = Writers(outbox.url, count=6)
    with Fleet(tmp_path / "fleet", [outbox_relay(outbox.url), orders]) as fleet, writers.writing():
        fleet.start_connected(2)
        until = time.monotonic() + 30
        while time.monotonic() < until or fleet.kills <= 10:
            fleet.start()
            pause = chance.uniform(0.2, 1.5)
            began = time.monotonic()
            while time.monotonic() - began < pause:
                writers.goes_on(1)
            fleet.kill(chance.choice(list(fleet.relays.values())))
            writers.goes_on(10)


# ---- every way of writing -------------------------------------------------------------------------------------------


@pytest.fixture
def two_phase(tmp_path: Path, or_skip: OrSkip) -> Iterator[Database]:
    settings = {"max_prepared_transactions": "20"}
    with or_skip(
        lambda: PostgresServer.start(find_postgres(NEWEST), tmp_path / "two-phase", settings=settings)
    ) as server:
        yield from migrated_database(server)


@pytest.mark.verify
async def test_two_phase_commit_works_while_a_relay_sleeps_and_its_events_arrive_when_it_is_decided(
    two_phase: Database, stage: Stage
) -> None:
    manifests = outbox_relay(two_phase.url), subscription("orders", STAGED, partitions=2)
    async with serving(*manifests) as relay:
        await await_until(lambda: len(status_of(relay, "orders").owned) == 2, what="the relay")
        committed: dict[str, Written] = {}
        for number in range(1, 11):
            # An idle relay would request NOTIFY, and a transaction with a NOTIFY cannot be prepared.
            await await_until(lambda: status_of(relay, "orders").lag == 0, what="the relay to be at rest")
            late, early = (Written(str(uuid.uuid4()), k, number, payload(k, number)) for k in ("late", "early"))
            undone = Written(str(uuid.uuid4()), "late", number, payload("late", number))
            with psycopg.connect(two_phase.url) as connection:
                connection.tpc_begin(connection.xid(1, f"done {number}", "shop"))
                _insert(connection, late)
                connection.tpc_prepare()
                committed |= write(two_phase.url, [early])
                connection.tpc_commit()
                committed[late.event_id] = late
                connection.tpc_begin(connection.xid(1, f"undone {number}", "shop"))
                _insert(connection, undone)
                connection.tpc_prepare()
                connection.tpc_rollback()
            await await_until(lambda n=number: len(stage["orders"].arrived) >= 2 * n, what="both events")  # type: ignore[misc]
    check_delivery(committed, (), stage["orders"].arrivals)


def _insert(connection: psycopg.Connection[tuple[object, ...]], event: Written) -> None:
    connection.execute(
        "insert into mailboat.outbox (event_id, event_type, key, payload) values (%s, 'order.placed', %s, %s)",
        [event.event_id, event.key, event.payload],
    )


async def test_copy_triggers_savepoints_and_serializable_writers_are_all_served(outbox: Database, stage: Stage) -> None:
    outbox.execute(
        """
        create table orders (id uuid primary key, key text, payload bytea);
        create function tell() returns trigger language plpgsql as $$
        begin
            insert into mailboat.outbox (event_id, event_type, key, payload)
            values (new.id, 'order.placed', new.key, new.payload);
            return null;
        end $$;
        create trigger tell after insert on orders for each row execute function tell();
        """
    )
    committed: dict[str, Written] = {}
    async with serving(outbox_relay(outbox.url), subscription("orders", STAGED, partitions=4)):
        committed |= write(outbox.url, events(50, 5, prefix="copy"))  # by COPY
        with psycopg.connect(outbox.url) as connection:
            for event in events(50, 5, prefix="trigger"):
                connection.execute("insert into orders values (%s, %s, %s)", [event.event_id, event.key, event.payload])
                committed[event.event_id] = event
        connection = psycopg.connect(outbox.url)
        with connection:
            for event in events(50, 5, prefix="savepoint"):
                with connection.transaction():
                    _insert(connection, event)
                    committed[event.event_id] = event
                with connection.transaction(force_rollback=True):
                    _insert(connection, Written(str(uuid.uuid4()), event.key, 0, payload(event.key, 0)))
        committed |= _serializable(outbox.url)
        await await_until(lambda: len(stage["orders"].arrived) >= len(committed), what="all of it")
    check_delivery(committed, (), stage["orders"].arrivals)


def _serializable(url: str) -> dict[str, Written]:
    """Run serializable writers that lock the row of their key first, as the documentation requires."""
    committed: dict[str, Written] = {}
    failures: list[BaseException] = []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table accounts (key text primary key, number integer not null default 0)")
        connection.execute("insert into accounts select 'serializable ' || n from generate_series(0, 3) n")

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with psycopg.connect(url) as connection:
                connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                for _ in range(40):
                    key = f"serializable {chance.randrange(4)}"
                    try:
                        row = connection.execute(
                            "update accounts set number = number + 1 where key = %s returning number", [key]
                        ).fetchone()
                        assert row is not None
                        event = Written(str(uuid.uuid4()), key, row[0], payload(key, row[0]))
                        _insert(connection, event)
                        connection.commit()
                        committed[event.event_id] = event
                    except psycopg.errors.SerializationFailure:
                        connection.rollback()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert committed
    return committed


# ---- G8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.verify
async def test_an_idle_relay_writes_nothing_but_its_heartbeat(outbox: Database, stage: Stage) -> None:
    subscriptions = [subscription(f"orders-{n}", STAGED, partitions=8) for n in range(3)]
    async with serving(outbox_relay(outbox.url), *subscriptions, timings=None) as relay:
        committed = write(outbox.url, events(100, 10))
        await await_until(lambda: all(len(s.arrived) == 100 for s in stage.values()) and len(stage) == 3, what="flow")
        await await_until(lambda: all(status_of(relay, name).lag == 0 for name in stage), what="rest")
        assert committed
        await await_until(lambda: outbox.execute("select bool_and(active) from mailboat.wakeup_requests") == [(True,)])
        _write_down_who_writes(outbox)
        await _beats(outbox, 3)  # work in flight ends
        outbox.execute("delete from public.writes")
        began = time.monotonic()
        written = await _beats(outbox, 6)
        took = time.monotonic() - began
    assert set(written) == {"relays"}
    assert written["relays"] <= took + 2, "one a second"


def _write_down_who_writes(outbox: Database) -> None:
    """Record every row that any session writes to a table of the schema.

    Statistics of the server would come too late.
    """
    outbox.execute(
        """
        create table public.writes (what text not null);
        create function public.note() returns trigger language plpgsql as $$
        begin
            insert into public.writes values (tg_table_name);
            return null;
        end $$;
        do $$
        declare
            tab regclass;
        begin
            for tab in
                select oid from pg_class
                where relnamespace = 'mailboat'::regnamespace and relkind in ('r', 'p') and not relispartition
            loop
                execute format('create trigger note after insert or update or delete on %s'
                               ' for each row execute function public.note()', tab);
            end loop;
        end $$;
        """
    )


async def _beats(outbox: Database, count: int) -> Counter[str]:
    """Wait for a number of heartbeats and return the written rows by table."""

    def written() -> Counter[str]:
        counted = Counter[str](what for (what,) in outbox.execute("select what from public.writes"))
        return counted if counted["relays"] >= count else Counter()

    return await await_until(written, what=f"{count} heartbeats")
