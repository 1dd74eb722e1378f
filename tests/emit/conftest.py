"""Outboxes on the newest and on the oldest supported Postgres."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mailboat_devservers.postgres import Database, PostgresServer
from support.databases import migrated_database


@pytest.fixture(params=["postgres", "postgres14"])
def outbox(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A migrated database; the test runs on both majors."""
    yield from migrated_database(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def shared_outbox(postgres: PostgresServer) -> Iterator[Database]:
    yield from migrated_database(postgres)


@pytest.fixture
def newest_outbox(shared_outbox: Database) -> Database:
    """An empty outbox on the newest Postgres, shared by a module, for tests that do not depend on the version."""
    shared_outbox.execute("delete from mailboat.outbox")
    return shared_outbox
