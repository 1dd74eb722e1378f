"""A Postgres connection shared by two interfaces of psycopg, without conflicts and without unsent data."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mailboat.errors import ConfigError, DatabaseUnavailable
from mailboat.logs import JsonLines, ReadableLines
from mailboat.store.connection import Pipeline, PostgresConnection, refuse_other_server
from mailboat.store.connection_thread import BlockingWork
from mailboat.store.sql import statements
from mailboat.store.window_reads import ReadThread
from mailboat_devservers.postgres import Database
from support.databases import connected
from support.wait import await_until


async def test_what_was_asked_often_by_one_interface_can_be_asked_often_by_the_other(each_database: Database) -> None:
    async with connected(each_database.url, "work") as link:
        for _ in range(10):  # psycopg prepares a statement at its sixth execution and names it by number
            async with link.autocommit() as cursor:
                await cursor.execute("select 1")
        for _ in range(10):
            answers = await link.pipeline(lambda pipeline: pipeline.send("select 2").fetchall())
            async with link.transaction() as cursor:
                await cursor.execute("select 3")
        assert answers == [(2,)]


async def test_what_is_too_large_for_the_socket_is_sent_to_its_end(each_database: Database) -> None:
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


async def test_what_takes_longer_the_more_there_is_has_no_deadline_and_all_else_has(each_database: Database) -> None:
    async with connected(each_database.url, "rebase", deadline=3.0) as link:
        async with link.transaction() as cursor:
            link.take_time()
            await cursor.execute("select pg_sleep(4)")
        with pytest.raises(DatabaseUnavailable, match="did not answer within 3 s"):
            async with link.transaction() as cursor:
                await cursor.execute("select pg_sleep(60)")


async def test_a_link_is_closed_after_the_thread_that_speaks_over_it(each_database: Database) -> None:
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
async def test_a_malformed_url_is_not_repeated(database: Database, password: str) -> None:
    """libpq would parse a part of the password as host, port or database, and repeat it in its errors."""
    url = f"postgresql://shop:{password}@host/db"
    link = await PostgresConnection.open(lambda: database.url, "control")
    reader = ReadThread(lambda: url, link.server, 5.0)
    try:
        for opening in (
            PostgresConnection.open(lambda: url, "work"),
            reader.transaction(lambda pipeline: lambda: None),
        ):
            with pytest.raises(ConfigError, match="percent-encoded") as told:
                await opening
            assert "word" not in str(told.value)
    finally:
        await reader.close()
        await link.close()


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


async def test_who_gives_up_while_a_connection_is_made_does_not_wait_for_the_answer(each_database: Database) -> None:
    link = await PostgresConnection.open(lambda: each_database.url, "control")
    asked, answer = threading.Event(), threading.Event()
    begun: list[Pipeline] = []

    def url() -> str:
        asked.set()
        answer.wait(20)
        return each_database.url

    def work(pipeline: Pipeline) -> Callable[[], None]:
        begun.append(pipeline)
        return lambda: None

    reader = ReadThread(url, link.server, 5.0)
    try:
        reading = asyncio.ensure_future(reader.transaction(work, patient=True))
        await await_until(asked.is_set, what="the thread to connect")
        reading.cancel()
        asyncio.get_running_loop().call_later(0.2, answer.set)
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not begun, "a large window would have been measured for nobody"
        await reader.transaction(work)  # the next transaction is served
        assert begun
    finally:
        await reader.close()
        await link.close()


async def test_a_thread_that_is_at_work_still_stops_nobody() -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(20)

    blocking = BlockingWork("stuck", 5.0, lambda: None)
    working = asyncio.ensure_future(blocking.run(work))
    await await_until(begun.is_set, what="the thread to begin")
    for _ in range(2):  # the first cancellation waits for the thread
        working.cancel()
        await asyncio.wait({working}, timeout=0.1)
    assert working.cancelled()
    asyncio.get_running_loop().call_later(0.2, end.set)
    blocking.close()
    assert not end.is_set(), "the loop went on"
    stuck = [thread for thread in threading.enumerate() if "stuck" in thread.name]
    await await_until(lambda: not any(thread.is_alive() for thread in stuck), what="the thread to end")
