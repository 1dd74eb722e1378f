"""A cluster's folder is never taken for one that somebody left behind, not even while it is being made."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster.folders import abandoned_folders, own_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_its_owners_until_the_owner_is_done():
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
    assert list(abandoned_folders("cluster-")) == [], "somebody is at it"
    assert list(found) == []
    assert not left.exists()


def test_there_is_no_moment_in_which_a_new_folder_seems_to_be_nobodys(monkeypatch: pytest.MonkeyPatch):
    flock = fcntl.flock
    asked = []

    def after_a_look_around(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:  # the owner is about to lock it
            asked.append(list(abandoned_folders("cluster-")))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", after_a_look_around)
    with own_folder("cluster-") as folder:
        assert asked == [[]]
        assert folder.is_dir()
