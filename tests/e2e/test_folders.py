"""The folder of a running cluster is never treated as abandoned, not even during its creation."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster.folders import abandoned_folders, own_folder


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_in_use_is_not_abandoned_and_is_removed_by_its_owner():
    with own_folder("cluster-") as folder:
        assert list(abandoned_folders("cluster-")) == []
        assert folder.is_dir()
    assert not folder.exists()


def test_a_folder_whose_owner_was_killed_is_found_once_and_removed(tmp_path: Path):
    left = tmp_path / "cluster-1"
    left.mkdir()
    (left / "owner").touch()
    assert list(abandoned_folders("other-")) == []
    found = abandoned_folders("cluster-")
    assert next(found) == left
    assert list(abandoned_folders("cluster-")) == [], "two runs clean up the same folder"
    assert list(found) == []
    assert not left.exists()


def test_a_folder_is_not_abandoned_before_its_owner_has_the_lock(monkeypatch: pytest.MonkeyPatch):
    flock = fcntl.flock
    found = []

    def search_before_lock(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:  # by the owner
            found.append(list(abandoned_folders("cluster-")))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", search_before_lock)
    with own_folder("cluster-") as folder:
        assert found == [[]]
        assert folder.is_dir()
