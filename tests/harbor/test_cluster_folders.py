"""What a run of the end-to-end tests leaves when it is killed is found by the next one, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.folders import abandoned_folders, own_folder

E2E = Path(__file__).parents[2] / "e2e"
OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from cluster.folders import own_folder
with own_folder("cluster-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(E2E.parent / "tests"))


def test_a_folder_is_gone_when_its_owner_is_done():
    with own_folder("cluster-") as folder:
        assert list(abandoned_folders("cluster-")) == []
        assert folder.is_dir()
    assert not folder.exists()


def test_a_folder_whose_owner_was_killed_is_found_and_removed():
    command = [sys.executable, "-c", OWNER, str(E2E)]
    with (
        own_folder("cluster-") as ours,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        assert list(abandoned_folders("cluster-")) == []
        other.kill()
        other.wait()
        assert list(abandoned_folders("cluster-")) == [left]
        assert not left.exists()
        assert ours.is_dir()
