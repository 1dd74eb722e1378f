"""Backends of the store as fixtures.

Every test of the conformance suite runs in memory, on both Postgres versions, and on a table with other column names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from mailboat.store.connection import PostgresConnection
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database, PostgresServer
from support.databases import connected, migrated_database
from support.renamed_table import RENAMED, make_renamed
from support.store_backends import MemoryWorld, PostgresWorld, World

RENAMED_COLUMNS = pytest.param("renamed", marks=pytest.mark.verify)  # tests/store/test_own_table.py is in the gate


@pytest.fixture(scope="module")
def outbox_database(postgres: PostgresServer) -> Iterator[Database]:
    yield from migrated_database(postgres)


@pytest.fixture(scope="module")
def outbox_database14(postgres14: PostgresServer) -> Iterator[Database]:
    yield from migrated_database(postgres14)


@pytest.fixture(scope="module")
def renamed_database(postgres: PostgresServer) -> Iterator[Database]:
    for database in migrated_database(postgres):
        make_renamed(database)
        yield database


@pytest_asyncio.fixture
async def link(each_outbox: Database) -> AsyncIterator[PostgresConnection]:
    async with connected(each_outbox.url, "control") as link:
        yield link


@pytest.fixture(params=["memory", "postgres", "postgres14", RENAMED_COLUMNS])
def any_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Empty outbox for a test that runs its own event loops and closes its stores in them."""
    found = _world(request)
    yield found
    found.dismiss_writers()


@pytest_asyncio.fixture
async def world(any_world: World) -> AsyncIterator[World]:
    """Empty outbox."""
    yield any_world
    await any_world.close()


@pytest.fixture(params=["postgres", "postgres14", RENAMED_COLUMNS])
def any_server(request: pytest.FixtureRequest) -> World:
    return _world(request)


@pytest_asyncio.fixture
async def postgres_world(any_server: PostgresWorld) -> AsyncIterator[PostgresWorld]:
    """Empty outbox on a real server, for behaviour that only a server has."""
    yield any_server
    await any_server.close()


_PLACES = {"postgres": "outbox_database", "postgres14": "outbox_database14", "renamed": "renamed_database"}


def _world(request: pytest.FixtureRequest) -> World:
    # Called from a synchronous fixture, since a migration runs its own event loop.
    if request.param == "memory":
        return MemoryWorld()
    layout = RENAMED if request.param == "renamed" else TableLayout()
    world = PostgresWorld(request.getfixturevalue(_PLACES[request.param]), layout)
    world.reset()
    return world
