"""The playground starts, delivers events, and leaves no processes and files after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from mailboat_devservers.golang import built_program
from support.wait import wait_until


@pytest.mark.timeout(600)  # half a dozen processes start in sequence
def test_the_playground_delivers_events_and_ctrl_c_removes_processes_and_files(
    tmp_path: Path, or_skip: Callable[[Callable[[], Path]], Path]
) -> None:
    or_skip(lambda: built_program("kfake"))
    (folder := tmp_path / "files").mkdir()
    output = tmp_path / "output"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mailboat_demo.playground"],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: "The playground is up" in output.read_text() or process.poll() is not None,
            timeout=420,
            what="the playground",
        )
        text = output.read_text()
        assert process.poll() is None, text
        children = psutil.Process(process.pid).children(recursive=True)
        consumer_log = Path(re.findall(r"its log: (\S+)", text)[0])
        wait_until(lambda: "order.changed order-0 version 1" in consumer_log.read_text(), timeout=120, what="an event")
        for address in re.findall(r"http://127\.0\.0\.1:\d+(?=/)", text):
            with urlopen(f"{address}/status", timeout=60) as answer:
                assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=180) == 0, output.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "everything was stopped and removed" in output.read_text()
    wait_until(
        lambda: not any(psutil.pid_exists(each.pid) and each.is_running() for each in children), what="their end"
    )
    assert list(folder.iterdir()) == []
