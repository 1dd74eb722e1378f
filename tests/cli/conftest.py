"""Manifests on real databases, and relays in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mailboat_devservers.postgres import Database
from support.cli import Place, RunningRelay, relay_manifest, subscription_manifest


@pytest.fixture(autouse=True)
def unsettled_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep ``mailboat run`` from configuring the garbage collector: the settings would affect all later tests."""
    monkeypatch.setattr("mailboat.cli.run.configure_gc", lambda: None)


def _place(tmp_path: Path, database: Database) -> Place:
    folder = tmp_path / "manifests"
    folder.mkdir()
    place = Place(folder, database)
    place.write(relay_manifest(database.url), subscription_manifest())
    return place


@pytest.fixture
def place(tmp_path: Path, outbox: Database) -> Place:
    """Manifests of a relay with one subscription, on a migrated database."""
    return _place(tmp_path, outbox)


@pytest.fixture
def empty_place(tmp_path: Path, database: Database) -> Place:
    """The same manifests on a database without the schema of Mailboat."""
    return _place(tmp_path, database)


@pytest.fixture
def start_relay(tmp_path: Path) -> Iterator[Callable[..., RunningRelay]]:
    """``start_relay("-f", path)`` starts a relay and returns when it listens. The relay is killed after the test."""
    started: list[RunningRelay] = []

    def start(*arguments: str) -> RunningRelay:
        started.append(RunningRelay(arguments, tmp_path / f"relay-{len(started)}.log"))
        started[-1].address()  # wait here, so that later timeouts do not include the start of the process
        return started[-1]

    yield start
    for relay in started:
        if relay.process.poll() is None:
            relay.process.kill()
            relay.process.wait(timeout=10)
