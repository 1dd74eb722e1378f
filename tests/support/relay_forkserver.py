"""Fork server for relays: a process that has imported the relay, and forks one relay per request.

    python -m support.relay_forkserver NAME

The start of an interpreter and the imports take a second of CPU time, too much for tests that kill a relay every
second. A forked relay is an ordinary process with its own session, log and exit status.

The fork server listens on a socket of that name. Each connection is one relay: the client sends its settings (see
`relay_main`), and receives the process id and, after the end of the relay, its exit status.
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
"""Largest message, in bytes."""


def address(name: str) -> str:
    """Return an address in the abstract namespace. No file is left behind, and folder names may be long."""
    return f"\0mailboat-forkserver-{name}"


# ---- client -------------------------------------------------------------------------------------------------------


def is_open(name: str) -> bool:
    """Return True if a fork server accepts connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        return line.connect_ex(address(name)) == 0


class ForkedProcess:
    """Forked relay with the interface of ``subprocess.Popen``."""

    def __init__(self, server: str, orders: Mapping[str, Any], log: Path) -> None:
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(address(server))
        self._line.send(json.dumps({"orders": orders, "log": str(log)}).encode())
        self.pid = int(self._line.recv(_LONGEST))

    def poll(self) -> int | None:
        return self._receive(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._receive(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"relay {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the process has already ended
                os.kill(self.pid, number)

    def _receive(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            self.returncode = int(self._line.recv(_LONGEST) or -signal.SIGKILL)  # empty: the fork server has ended
            self._line.close()
        return self.returncode


# ---- server -------------------------------------------------------------------------------------------------------


def next_orders(name: str) -> dict[str, Any]:
    """Fork a relay for each connection. Return in the forked processes only."""
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
                _send_exit_statuses(lines)
            if listener in ready:
                line, _ = listener.accept()
                request = line.recv(_LONGEST)
                if not request:  # a connection of is_open
                    line.close()
                    continue
                given = json.loads(request)
                pid = os.fork()
                if pid:
                    lines[pid] = line
                    continue
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (alarm, bell, *lines.values()):
                    other.close()
                _detach(given["log"])
                line.send(str(os.getpid()).encode())
                line.close()
                return dict(given["orders"])


def _send_exit_statuses(lines: dict[int, socket.socket]) -> None:
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with lines.pop(pid) as line:
            try:
                line.send(str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                pass  # the client has closed the connection


def _detach(log: str) -> None:
    """Start a session, redirect the output to the log, and end with the fork server."""
    os.setsid()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the fork server died before its relay started")
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


if __name__ == "__main__":
    from support import relay_main  # not needed by clients

    for sink in entry_points(group="mailboat.sinks"):
        sink.load()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"there are {threads} threads, and a fork has only one of them")
    relay_main.run_relay(next_orders(sys.argv[1]))
