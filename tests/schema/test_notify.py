"""The trigger that wakes idle relays never harms the transaction that it runs in (G10)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from mailboat import emit
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import RelayIdentity, StoreSettings
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from mailboat_spec import Notify
from support.databases import migrated_database
from support.store_backends import joined


@contextmanager
def listener(database: Database) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("listen mailboat")
        yield connection


def heard(connection: psycopg.Connection) -> list[str]:
    """Return all notifications so far.

    The answer to a later statement arrives after the notifications of committed transactions.
    """
    connection.execute("select 1")
    return [notify.payload for notify in connection.notifies(timeout=0)]


def set_bell(
    database: Database, rings: bool, outbox: str = "mailboat.outbox", alive_for: str = "1 min", number: int = 1
) -> None:
    relay = f"relay {number} of {outbox}"
    with psycopg.connect(database.url) as connection:
        connection.execute("insert into mailboat.outboxes (name) values (%s) on conflict do nothing", [outbox])
        connection.execute(
            "insert into mailboat.relays (id, incarnation, outbox, session_lock, beat_at, expires_at)"
            " values (%s, gen_random_uuid(), %s, true, now(), clock_timestamp() + %s::interval)"
            " on conflict (id) do update set expires_at = excluded.expires_at",
            (relay, outbox, alive_for),
        )
        connection.execute(
            "insert into mailboat.wakeup_requests values (%s, %s, %s)"
            " on conflict (relay) do update set active = excluded.active",
            (relay, outbox, rings),
        )


def write(database: Database, count: int = 1) -> None:
    with psycopg.connect(database.url) as connection:
        connection.execute("set statement_timeout = '5s'")
        for _ in range(count):
            emit(connection, "x", {}, key="k")


def test_writers_notify_only_while_a_relay_is_idle(outbox: Database) -> None:
    with listener(outbox) as relay:
        write(outbox)
        assert heard(relay) == []
        set_bell(outbox, rings=True, outbox="shop.other")
        write(outbox)
        assert heard(relay) == []
        set_bell(outbox, rings=True)
        write(outbox, 3)
        assert heard(relay) == ["mailboat.outbox"], "once per transaction"
        set_bell(outbox, rings=False)
        write(outbox)
        assert heard(relay) == []


def test_writers_notify_while_one_of_two_relays_is_idle(outbox: Database) -> None:
    set_bell(outbox, rings=True, number=1)
    set_bell(outbox, rings=True, number=2, alive_for="2 min")
    with listener(outbox) as relay:
        set_bell(outbox, rings=False, number=2)
        write(outbox)
        assert heard(relay) == ["mailboat.outbox"]
        set_bell(outbox, rings=False, number=1)
        write(outbox)
        assert heard(relay) == []


def test_a_writer_with_an_old_snapshot_notifies_a_relay_that_became_idle_since(outbox: Database) -> None:
    with listener(outbox) as relay, psycopg.connect(outbox.url) as writer:
        writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        writer.execute("select count(*) from mailboat.relays")
        set_bell(outbox, rings=True)
        emit(writer, "x", {})
        writer.commit()
        assert heard(relay) == ["mailboat.outbox"]


async def asleep(database: Database) -> PostgresStore:
    identity = RelayIdentity("the only one", str(uuid.uuid4()))
    store = await PostgresStore.open(lambda: database.url, identity, StoreSettings())
    await store.join()
    await store.enable_wakeups()
    return store


async def test_writers_do_not_notify_for_a_relay_that_was_killed_while_idle(outbox: Database) -> None:
    store = await asleep(outbox)
    with listener(outbox) as somebody:
        write(outbox)
        assert heard(somebody) == ["mailboat.outbox"]
        await store.close(leave=False)  # as after SIGKILL
        outbox.execute("update mailboat.relays set expires_at = clock_timestamp()")  # as after the lease ends
        write(outbox)
        assert heard(somebody) == []


@pytest.mark.parametrize("notify", [Notify.AUTO, Notify.NEVER])
async def test_a_restarted_relay_removes_its_former_wakeup_request(outbox: Database, notify: Notify) -> None:
    await (await asleep(outbox)).close(leave=False)
    identity = RelayIdentity("the only one", str(uuid.uuid4()))
    store = await PostgresStore.open(lambda: outbox.url, identity, StoreSettings(notify=notify))
    await joined(store)
    with listener(outbox) as somebody:
        write(outbox)
        assert heard(somebody) == []
    await store.close(leave=True)


def test_copy_notifies_too(outbox: Database) -> None:
    set_bell(outbox, rings=True)
    with listener(outbox) as relay:
        with (
            psycopg.connect(outbox.url) as connection,
            connection.cursor() as cursor,
            cursor.copy("copy mailboat.outbox (event_type) from stdin") as copy,
        ):
            copy.write_row(("copied",))
        assert heard(relay) == ["mailboat.outbox"]


@pytest.mark.parametrize("table", ["wakeup_requests", "relays"])
def test_locked_wakeup_requests_are_not_waited_for(outbox: Database, table: str) -> None:
    set_bell(outbox, rings=True)
    with psycopg.connect(outbox.url) as somebody:
        somebody.execute(sql.SQL("lock table mailboat.{} in access exclusive mode").format(sql.Identifier(table)))
        write(outbox)
    assert outbox.execute("select count(*) from mailboat.outbox") == [(1,)]


@pytest.mark.parametrize("table", ["wakeup_requests", "relays"])
def test_missing_bookkeeping_fails_no_writer(outbox: Database, table: str) -> None:
    set_bell(outbox, rings=True)
    outbox.execute(sql.SQL("drop table mailboat.{}").format(sql.Identifier(table)))
    write(outbox)
    assert outbox.execute("select count(*) from mailboat.outbox") == [(1,)]


def test_a_serializable_writer_does_not_conflict_with_relays_that_become_idle(outbox: Database) -> None:
    set_bell(outbox, rings=False)
    with psycopg.connect(outbox.url) as writer:
        writer.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        emit(writer, "x", {})
        set_bell(outbox, rings=True)
        emit(writer, "y", {})
    assert outbox.execute("select count(*) from mailboat.outbox") == [(2,)]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[PostgresServer]:
    """Server with a small notification queue and two-phase commit."""
    settings = {"max_notify_queue_pages": "64", "max_prepared_transactions": "5", "fsync": "off"}
    with PostgresServer.start(find_postgres(NEWEST), tmp_path / "server", settings=settings) as server:
        yield server


def shout_until_it_fails(connection: psycopg.Connection) -> None:
    while True:
        connection.execute("select pg_notify('other', repeat('x', 7000) || i) from generate_series(1, 9) i")


def test_a_notification_queue_that_fills_up_gets_no_more_notifications(own_server: PostgresServer) -> None:
    def usage() -> float:
        ((share,),) = own_server.execute("select pg_notification_queue_usage()")
        return float(share)

    for database in migrated_database(own_server):
        with psycopg.connect(database.url) as stuck, psycopg.connect(database.url, autocommit=True) as noisy:
            stuck.execute("listen mailboat")
            stuck.commit()
            stuck.execute("select 1")  # stays in this transaction
            set_bell(database, rings=True)
            write(database)
            while usage() <= 0.1:
                noisy.execute("select pg_notify('other', repeat('x', 7000) || i) from generate_series(1, 4) i")
            before = usage()
            with psycopg.connect(database.url) as writer:
                for _ in range(300):
                    emit(writer, "x", {})
                    writer.commit()
            assert usage() == before, "writers do not make it worse"
            with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="too many notifications"):
                shout_until_it_fails(noisy)
            write(database)  # with a full queue
        assert database.execute("select count(*) from mailboat.outbox") == [(302,)]


@pytest.mark.parametrize(("rings", "alive_for"), [(False, "1 min"), (True, "0 s")])
def test_two_phase_commit_works_while_no_live_relay_requests_wakeups(
    own_server: PostgresServer, rings: bool, alive_for: str
) -> None:
    for database in migrated_database(own_server):
        set_bell(database, rings, alive_for=alive_for)
        with psycopg.connect(database.url) as connection:
            emit(connection, "x", {})
            connection.execute("prepare transaction 'x'")
        with psycopg.connect(database.url, autocommit=True) as connection:
            connection.execute("commit prepared 'x'")
        assert database.execute("select count(*) from mailboat.outbox") == [(1,)]
