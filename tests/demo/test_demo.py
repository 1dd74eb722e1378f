"""The demo as a process: without a terminal to its end, and on a terminal until Ctrl-C."""

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
    """The demo's folder for temporary files."""
    (place := tmp_path / "files").mkdir()
    return place


@pytest.mark.timeout(600)  # a dozen processes start in sequence, which takes minutes on a busy machine
def test_the_demo_proves_that_no_event_was_lost_and_removes_its_files(
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
    text = output.read_text()
    assert done.returncode == 0, text
    found = PROOF.search(text)
    assert found is not None, text
    assert found[1] == found[2]
    assert int(found[1]) > 100
    assert re.search(r"(\d+) effects of \1 events, each once; killed in the handler [1-9]", text), text
    for step in ("took over after", "order.exported   order-large", "1 dead letter replayed", "came back to life"):
        assert step in text, text
    assert list(folder.iterdir()) == []


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_on_a_terminal_the_demo_is_a_live_screen_and_ctrl_c_removes_processes_and_files(folder: Path):
    with Terminal([*DEMO, "--broker", "mock"], {**os.environ, "TMPDIR": str(folder)}) as terminal:
        wait_until(
            lambda: "The application changes orders" in terminal.text or terminal.process.poll() is not None,
            timeout=120,
            what="the demo to run",
        )
        processes = psutil.Process(terminal.process.pid).children(recursive=True)
        assert processes, terminal.text
        wait_until(lambda: "partitions " in terminal.text, timeout=60, what="a relay on the screen")
        terminal.press(CTRL_C)
        assert terminal.wait(60) == 130, terminal.text
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR) >= 0, "the cursor is hidden"
    assert "everything was stopped and removed" in terminal.text
    assert "Traceback" not in terminal.text
    wait_until(
        lambda: not any(psutil.pid_exists(each.pid) and each.is_running() for each in processes), what="their end"
    )
    assert list(folder.iterdir()) == []
