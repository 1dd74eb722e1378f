"""What the fault tests share. The parts are in `fleet` (relays), `ledger` (truth and check), `collectors` and `racing`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mailboat_harbor.postgres import Database, PostgresServer
from migrated import migrated_database


@pytest.fixture
def outbox(postgres: PostgresServer) -> Iterator[Database]:
    """A fresh database with an outbox, on the shared server."""
    yield from migrated_database(postgres)
