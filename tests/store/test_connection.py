"""A Postgres connection: two interfaces of psycopg without conflicts, deadlines, and no unsent data."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from mailboat.errors import ConfigError, DatabaseUnavailable, MailboatError
from mailboat.store import postgres
from mailboat.store.connection import ConnectionThread, Pipeline, PostgresConnection, refuse_other_server
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import RelayIdentity, StoreSettings
from mailboat.store.sql import statements
from mailboat_devservers.postgres import Database
from mailboat_spec.structured_logs import JsonLines, ReadableLines
from support.databases import connected
from support.wait import await_until


async def test_both_interfaces_can_repeat_the_same_statement(each_database: Database) -> None:
    async with connected(each_database.url, "work") as link:
        for _ in range(10):  # psycopg prepares a statement at its sixth execution and names it by number
            async with link.autocommit() as cursor:
                await cursor.execute("select 1")
        for _ in range(10):
            answers = await link.pipeline(lambda pipeline: pipeline.send("select 2").fetchall())
            async with link.transaction() as cursor:
                await cursor.execute("select 3")
        assert answers == [(2,)]


async def test_a_statement_larger_than_the_socket_buffer_is_sent_completely(each_database: Database) -> None:
    async with connected(each_database.url, "work", deadline=10.0) as link:
        async with link.autocommit() as cursor:
            await cursor.execute("select pg_backend_pid()")
            row = await cursor.fetchone()
        assert row is not None
        backend = row[0]

        def work(pipeline: Pipeline) -> int:
            os.kill(backend, signal.SIGSTOP)  # the backend reads nothing, so that buffers fill up
            threading.Timer(0.5, os.kill, (backend, signal.SIGCONT)).start()
            sent = pipeline.send("select octet_length(%s::bytea)", [b"x" * 32_000_000])
            pipeline.wait()
            found = sent.fetchone()
            assert found is not None
            return int(found[0])

        assert await link.pipeline(work) == 32_000_000


async def test_only_work_that_grows_with_the_data_has_no_deadline(each_database: Database) -> None:
    async with connected(each_database.url, "rebase", deadline=3.0) as link:
        async with link.transaction() as cursor:
            link.take_time()
            await cursor.execute("select pg_sleep(4)")
        with pytest.raises(DatabaseUnavailable, match="did not answer within 3 s"):
            async with link.transaction() as cursor:
                await cursor.execute("select pg_sleep(60)")


async def test_a_connection_is_closed_after_the_thread_that_uses_it(each_database: Database) -> None:
    link = await PostgresConnection.open(lambda: each_database.url, "work")
    begun = threading.Event()

    def work(pipeline: Pipeline) -> list[object]:
        asked = pipeline.send("select 1 from pg_sleep(0.5)")
        begun.set()
        pipeline.wait()
        return list(asked.fetchall())

    working = asyncio.ensure_future(link.pipeline(work))
    await await_until(begun.is_set, what="the thread to speak")
    await link.close()
    assert await working == [(1,)]


@pytest.mark.parametrize("change", [{}, {"system_identifier": 1}, {"timeline": 99}], ids=str)
async def test_another_server_behind_the_same_connection_is_noticed(
    each_database: Database, change: dict[str, Any]
) -> None:
    """A pooler may switch to a restored copy between two transactions. The user of a relay need not be superuser."""
    link = await PostgresConnection.open(lambda: each_database.url, "work")

    def work(pipeline: Pipeline) -> None:
        pipeline.send("set local role pg_read_all_settings")
        guard = pipeline.send(statements("windows")["guard"])
        pipeline.wait()
        refuse_other_server(guard.fetchone(), replace(link.server, **change))

    try:
        if not change:
            await link.pipeline(work)
        else:
            with pytest.raises(DatabaseUnavailable, match="another server answers now"):
                await link.pipeline(work)
    finally:
        await link.close()


@pytest.mark.parametrize("password", ["pass%word", "pass@word", "pass/word", "1/pass@word", "p?a@word"])
async def test_a_malformed_url_is_not_repeated(password: str) -> None:
    """libpq would parse a part of the password as host, port or database, and repeat it in its errors."""
    url = f"postgresql://shop:{password}@host/db"
    with pytest.raises(ConfigError, match="percent-encoded") as told:
        await PostgresConnection.open(lambda: url, "work")
    assert "word" not in str(told.value)


@pytest.mark.parametrize("how", ["explained", "as it is", "in a group"])
async def test_a_row_that_the_server_repeats_is_in_no_message_and_no_traceback(database: Database, how: str) -> None:
    """The DETAIL of the server contains the row that breaks a constraint."""
    async with connected(database.url, "work") as link:
        try:
            if how == "explained":
                async with link.autocommit() as cursor:
                    await cursor.execute(_BREAKS_A_CONSTRAINT)
            else:
                await link.connection.execute(_BREAKS_A_CONSTRAINT)
        except Exception as error:
            caught: Exception = ExceptionGroup("several", [error]) if how == "in a group" else error
    record = logging.makeLogRecord({"msg": str(caught), "exc_info": (type(caught), caught, caught.__traceback__)})
    if how != "explained":
        record.msg = "It failed."
    for line in (JsonLines().format(record), ReadableLines(colours=False).format(record)):
        assert "violates check constraint" in line
        assert "top secret" not in line


_BREAKS_A_CONSTRAINT = """
    do $$ begin
        create temp table safe (payload text check (payload = ''));
        insert into safe values (E'line one\\ntop secret');
    end $$
"""


async def test_a_read_has_a_deadline_unless_it_is_patient_and_ends_if_it_is_cancelled(each_database: Database) -> None:
    link = await PostgresConnection.open(lambda: each_database.url, "read", deadline=1.0)
    begun = threading.Event()

    def work(pipeline: Pipeline, seconds: int) -> Callable[[], object]:
        slept = pipeline.send("select 1 from pg_sleep(%s)", [seconds])
        begun.set()
        return slept.fetchone

    try:
        assert await link.read(lambda pipeline: work(pipeline, 2), no_deadline=True) == (1,)
        with pytest.raises(DatabaseUnavailable, match="did not answer within 1 s"):
            await link.read(lambda pipeline: work(pipeline, 60))
        await link.close()
        link = await PostgresConnection.open(lambda: each_database.url, "measure")
        begun.clear()
        reading = asyncio.ensure_future(link.read(lambda pipeline: work(pipeline, 60), no_deadline=True))
        await await_until(begun.is_set, what="the thread to send the statement")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    finally:
        await link.close()


async def test_a_read_in_progress_fails_if_its_connection_is_closed_at_once(each_database: Database) -> None:
    link = await PostgresConnection.open(lambda: each_database.url, "probe")
    begun = threading.Event()

    def work(pipeline: Pipeline) -> Callable[[], object]:
        slept = pipeline.send("select 1 from pg_sleep(60)")
        begun.set()
        return slept.fetchone

    reading = asyncio.ensure_future(link.read(work))
    await await_until(begun.is_set, what="the thread to send the statement")
    await link.close(at_once=True)
    with pytest.raises(DatabaseUnavailable):
        await reading


@pytest.mark.parametrize("waiting", [True, False])
async def test_a_lost_connection_ends_the_wait_for_notifications(database: Database, waiting: bool) -> None:
    async def wait_until_lost(link: PostgresConnection) -> None:
        while await link.notified(30.0):
            pass

    before = len(os.listdir("/proc/self/fd"))
    async with connected(database.url, "control") as link:
        await link.listen("mailboat", "mailboat.outbox")
        wait = asyncio.ensure_future(wait_until_lost(link)) if waiting else None
        async with connected(database.url, "admin") as other, other.autocommit() as cursor:
            await cursor.execute("select pg_terminate_backend(%s)", [link.connection.info.backend_pid])
        with pytest.raises(DatabaseUnavailable):
            await (wait or wait_until_lost(link))
    assert len(os.listdir("/proc/self/fd")) == before, "the copy of the socket stayed open"


async def test_a_busy_thread_does_not_block_the_shutdown(database: Database) -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(20)

    link = await PostgresConnection.open(lambda: database.url, "work")
    thread = ConnectionThread("stuck", link.connection.pgconn)
    working = asyncio.ensure_future(thread.run(work))
    await await_until(begun.is_set, what="the thread to begin")
    for _ in range(2):  # the first cancellation waits for the thread
        working.cancel()
        await asyncio.wait({working}, timeout=0.1)
    assert working.cancelled()
    asyncio.get_running_loop().call_later(0.2, end.set)
    thread.close()
    assert not end.is_set(), "the loop went on"
    await link.close()
    stuck = [thread for thread in threading.enumerate() if "stuck" in thread.name]
    await await_until(lambda: not any(thread.is_alive() for thread in stuck), what="the thread to end")


async def test_a_connection_without_its_planner_settings_is_closed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_PLANNER", "select 1 / 0")
    with pytest.raises(MailboatError) as refusal:  # while the error is kept, so is everything that its frames refer to
        await PostgresStore.open(lambda: database.url, RelayIdentity("a relay", str(uuid4())), StoreSettings())
    with psycopg.connect(database.url) as observer:
        observer.autocommit = True
        others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        await await_until(lambda: observer.execute(others).fetchone() == (0,), timeout=5, what="the session to end")
    assert refusal.value is not None
