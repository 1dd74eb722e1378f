"""Migrated databases, and a writer that must never be hurt."""

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
    """A migrated database; the test runs on both majors."""
    yield from migrated_database(request.getfixturevalue(request.param))


@pytest.fixture(scope="module", params=["postgres", "postgres14"])
def shared_outbox(request: pytest.FixtureRequest) -> Iterator[Database]:
    """One migrated database for all tests of a module that change nothing in it; on both majors."""
    yield from migrated_database(request.getfixturevalue(request.param))


@pytest.fixture
async def connection(outbox: Database) -> AsyncIterator[psycopg.AsyncConnection]:
    """As retention wants it: autocommit, and the owner of everything."""
    async with await psycopg.AsyncConnection.connect(outbox.url, autocommit=True) as connection:
        yield connection


class Writer(threading.Thread):
    """An application that emits all the time and has no patience: any lock of ours that it meets is a failure (G10)."""

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
                        emit(connection, "written", {}, key="k")  # prepared by psycopg: a plan that outlives detaches
                    self.written += 2
                except psycopg.Error as failure:
                    self.failures.append(failure)

    def writes_on(self) -> None:
        """Returns once the writer has written some more."""
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
    """Writes during the whole test, which fails if a single write does."""
    writer = Writer(outbox)
    writer.start()
    yield writer
    writer.end()
