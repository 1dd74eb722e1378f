"""The servers of a test run end with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from mailboat_devservers.processes import Child
from support.wait import wait_until

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def sleeper(log: Path) -> Child:
    return Child("sleeper", SLEEPER, log=log, ready=lambda: "up" in log.read_text())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    child = sleeper(tmp_path / "log")
    thread = threading.Thread(target=child.launch)
    thread.start()
    thread.join()
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(child.pid).wait(timeout=0.3)
    child.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_test_run(tmp_path: Path, how: signal.Signals) -> None:
    program = f"""
import time
from pathlib import Path
from mailboat_devservers.processes import Child
log = Path({str(tmp_path / "log")!r})
child = Child("sleeper", {SLEEPER!r}, log=log, ready=lambda: "up" in log.read_text())
child.launch()
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        assert not is_gone(server)
        run.send_signal(how)
    wait_until(lambda: is_gone(server), what="the end of the server after the killed run")
