"""Migrated databases, and a writer that no test may disturb."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from mailboat import emit
from mailboat_devservers.postgres import Database
from support.databases import migrated_database
from support.wait import wait_until


@pytest.fixture(params=["postgres", "postgres14"])
def outbox(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Migrated database, on both Postgres versions."""
    yield from migrated_database(request.getfixturevalue(request.param))


@pytest.fixture(scope="module", params=["postgres", "postgres14"])
def shared_outbox(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Migrated database for all tests of a module that change nothing in it, on both Postgres versions."""
    yield from migrated_database(request.getfixturevalue(request.param))


@pytest.fixture
async def connection(outbox: Database) -> AsyncIterator[psycopg.AsyncConnection]:
    """Connection for retention: autocommit, as the owner of all tables."""
    async with await psycopg.AsyncConnection.connect(outbox.url, autocommit=True) as connection:
        yield connection


class Writer(threading.Thread):
    """Application that emits continuously with a short lock timeout.

    If it waits for a lock of a relay or of maintenance, the test fails (G10).
    """

    def __init__(self, database: Database) -> None:
        super().__init__(name="writer")
        self.written = 0
        self.failures: list[Exception] = []
        self._database = database
        self._told_to_end = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._database.url, autocommit=True) as connection:
            connection.execute("set lock_timeout = '200ms'")
            connection.execute("set statement_timeout = '60s'")
            while not self._told_to_end.is_set():
                try:
                    connection.execute("select mailboat.emit('written', '{}'::jsonb, key => 'k')")
                    with connection.transaction():
                        # psycopg prepares this statement, and its plan outlives detaches
                        emit(connection, "written", {}, key="k")
                    self.written += 2
                except psycopg.Error as failure:
                    self.failures.append(failure)

    def writes_on(self) -> None:
        """Wait until the writer has written more events."""
        goal = self.written + 5
        wait_until(lambda: self.written >= goal or bool(self.failures), what="the writer to go on")
        assert not self.failures

    def end(self) -> None:
        self._told_to_end.set()
        self.join()
        assert not self.failures
        assert self.written


@pytest.fixture
def writer(outbox: Database) -> Iterator[Writer]:
    """Writer that runs during the whole test. A failed write fails the test."""
    writer = Writer(outbox)
    writer.start()
    yield writer
    writer.end()
