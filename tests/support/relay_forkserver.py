"""Where relays come from that tests kill by the dozen: a process that has imported everything, and forks.

    python -m support.relay_forkserver NAME

Starting an interpreter and importing the relay takes a second of a processor, and a race in which one relay dies every
second would do little else. A forked relay is one like any other: a process with its own session, log and death.

The nursery listens on a socket of that name. Each connection is one relay: orders come in (see `relay_process`), the
process id goes out, and once the relay has ended, what it ended with.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LONGEST = 1 << 20
"""Bytes that a message has at most."""


def address(name: str) -> str:
    """In the kernel's own name space: no file is left behind, and no folder's name is too long for it."""
    return f"\0mailboat-nursery-{name}"


# ---- the test's side ------------------------------------------------------------------------------------------------


def is_open(name: str) -> bool:
    """Whether a nursery takes orders."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        return line.connect_ex(address(name)) == 0


class Newborn:
    """A relay that a nursery forked, as ``subprocess.Popen`` would show it."""

    def __init__(self, nursery: str, orders: Mapping[str, Any], log: Path) -> None:
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(address(nursery))
        self._line.send(json.dumps({"orders": orders, "log": str(log)}).encode())
        self.pid = int(self._line.recv(_LONGEST))

    def poll(self) -> int | None:
        return self._heard(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._heard(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"relay {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended by itself just now
                os.kill(self.pid, number)

    def _heard(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            self.returncode = int(self._line.recv(_LONGEST) or -signal.SIGKILL)  # empty: the nursery itself is gone
            self._line.close()
        return self.returncode


# ---- the nursery's side ---------------------------------------------------------------------------------------------


def next_orders(name: str) -> dict[str, Any]:
    """Forks a relay for each connection; returns in the relays only."""
    alarm, bell = socket.socketpair()
    for end in (alarm, bell):
        end.setblocking(False)
    signal.set_wakeup_fd(bell.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lines: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(name))
        listener.listen(64)
        while True:
            ready, _, _ = select.select([listener, alarm], [], [])
            if alarm in ready:
                alarm.recv(4096)
                _tell_deaths(lines)
            if listener in ready:
                line, _ = listener.accept()
                asked = line.recv(_LONGEST)
                if not asked:  # somebody only wanted to know whether we are here
                    line.close()
                    continue
                given = json.loads(asked)
                pid = os.fork()
                if pid:
                    lines[pid] = line
                    continue
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (alarm, bell, *lines.values()):
                    other.close()
                _stand_alone(given["log"])
                line.send(str(os.getpid()).encode())
                line.close()
                return dict(given["orders"])


def _tell_deaths(lines: dict[int, socket.socket]) -> None:
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with lines.pop(pid) as line:
            try:
                line.send(str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                pass  # nobody wants to know any more


def _stand_alone(log: str) -> None:
    """A session of its own, its own log, and the nursery's death is its death."""
    os.setsid()
    nursery = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != nursery:
        sys.exit("the nursery died before its relay started")
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


if __name__ == "__main__":
    from support import relay_main  # the tests' side has no use for it

    for sink in entry_points(group="mailboat.sinks"):
        sink.load()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"there are {threads} threads already, and of those a fork takes only one along")
    relay_main.obey(next_orders(sys.argv[1]))
