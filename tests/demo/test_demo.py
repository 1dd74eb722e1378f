"""The demo, run as a newcomer runs it: as a process, without a terminal to its end, and on one until interrupted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mailboat_devservers.golang import built_program
from support.terminal import CTRL_C, HIDE_CURSOR, SHOW_CURSOR, Terminal
from support.wait import wait_until

PROOF = re.compile(r"^PROOF: (\d+) written, (\d+) received, 0 lost, 0 out of order, 0 uncommitted", re.MULTILINE)


DEMO = [sys.executable, "-m", "mailboat_demo", "--short"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For everything that the demo puts on disk."""
    (place := tmp_path / "files").mkdir()
    return place


@pytest.mark.timeout(600)  # a dozen processes start, one after the other: seconds alone, minutes beside other tests
def test_it_proves_that_nothing_was_lost_and_leaves_nothing_behind(
    folder: Path, tmp_path: Path, or_skip: Callable[[Callable[[], Path]], Path]
):
    or_skip(lambda: built_program("kfake"))
    output = tmp_path / "output"
    with output.open("wb") as log:
        done = subprocess.run(
            [*DEMO, "--broker", "kfake"],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=560,
            check=False,
        )
    told = output.read_text()
    assert done.returncode == 0, told
    found = PROOF.search(told)
    assert found is not None, told
    assert found[1] == found[2]
    assert int(found[1]) > 100
    assert re.search(r"(\d+) effects of \1 events, each once; killed in the handler [1-9]", told), told
    for step in ("took over after", "order.exported   order-large", "1 dead letter replayed", "came back to life"):
        assert step in told, told
    assert list(folder.iterdir()) == []


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_on_a_terminal_it_is_a_live_screen_and_ctrl_c_stops_and_removes_everything(folder: Path):
    with Terminal([*DEMO, "--broker", "mock"], {**os.environ, "TMPDIR": str(folder)}) as terminal:
        wait_until(
            lambda: "The application changes orders" in terminal.text or terminal.process.poll() is not None,
            timeout=120,
            what="the demo to be under way",
        )
        servants = psutil.Process(terminal.process.pid).children(recursive=True)
        assert servants, terminal.text
        wait_until(lambda: "partitions " in terminal.text, timeout=60, what="a relay in the picture")
        terminal.press(CTRL_C)
        assert terminal.wait(60) == 130, terminal.text
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR) >= 0, "the terminal is as it was"
    assert "everything was stopped and removed" in terminal.text
    assert "Traceback" not in terminal.text
    wait_until(
        lambda: not any(psutil.pid_exists(each.pid) and each.is_running() for each in servants), what="their end"
    )
    assert list(folder.iterdir()) == []
