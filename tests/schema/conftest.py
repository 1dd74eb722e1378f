"""Migrated databases, and a writer that no test may disturb."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from mailboat_devservers.postgres import Database
from support.databases import migrated_database
from support.steady_writer import SteadyWriter


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


@pytest.fixture
def writer(outbox: Database) -> Iterator[SteadyWriter]:
    """Writer that runs during the whole test. A failed write fails the test."""
    with SteadyWriter(outbox) as writer:
        yield writer
