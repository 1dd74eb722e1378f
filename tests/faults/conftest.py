"""What the fault tests share: see `fleet` (relays), `ledger` (truth and check), `collectors`, `racing`, `inprocess`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.inprocess import StagedSink, staged_sinks_installed
from mailboat_harbor.postgres import Database, PostgresServer
from migrated import migrated_database


@pytest.fixture
def outbox(postgres: PostgresServer) -> Iterator[Database]:
    """A fresh database with an outbox, on the shared server."""
    yield from migrated_database(postgres)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[dict[str, StagedSink]]:
    """Sinks of the kind ``STAGED``, by the name of their subscription, once a relay has built them."""
    with staged_sinks_installed(tmp_path) as stage:
        yield stage
