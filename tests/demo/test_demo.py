"""The demo, run as a newcomer runs it: as a process, without a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mailboat_harbor.golang import built_program
from waiting import wait_until

PROOF = re.compile(r"^PROOF: (\d+) written, (\d+) received, 0 lost, 0 out of order, 0 uncommitted", re.MULTILINE)


def start_demo(folder: Path, output: Path, *options: str) -> subprocess.Popen[bytes]:
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "mailboat.demo", "--short", *options],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For everything that the demo puts on disk."""
    (place := tmp_path / "files").mkdir()
    return place


@pytest.mark.timeout(400)  # a dozen processes start, one after the other: seconds alone, minutes beside other tests
def test_it_proves_that_nothing_was_lost_and_leaves_nothing_behind(
    folder: Path, tmp_path: Path, or_skip: Callable[[Callable[[], Path]], Path]
):
    or_skip(lambda: built_program("kfake"))
    output = tmp_path / "output"
    demo = start_demo(folder, output, "--broker", "kfake")
    status = demo.wait(380)
    told = output.read_text()
    assert status == 0, told
    found = PROOF.search(told)
    assert found is not None, told
    assert found[1] == found[2]
    assert int(found[1]) > 100
    for step in ("took over after", "order.exported   order-large", "1 dead letter replayed", "came back to life"):
        assert step in told, told
    assert list(folder.iterdir()) == []


@pytest.mark.timeout(200)
def test_an_interrupt_stops_and_removes_everything(folder: Path, tmp_path: Path):
    output = tmp_path / "output"
    demo = start_demo(folder, output, "--broker", "mock")
    wait_until(
        lambda: "The application changes orders" in output.read_text() or demo.poll() is not None,
        timeout=120,
        what="the demo to be under way",
    )
    servants = psutil.Process(demo.pid).children(recursive=True)
    assert servants, output.read_text()
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, output.read_text()
    assert "everything was stopped and removed" in output.read_text()
    assert "Traceback" not in output.read_text()
    wait_until(
        lambda: not any(psutil.pid_exists(each.pid) and each.is_running() for each in servants), what="their end"
    )
    assert list(folder.iterdir()) == []
