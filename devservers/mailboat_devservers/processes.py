"""Start of all server processes, in one module so that their end is guaranteed in one place.

A ``Child`` has its own process group and session (Ctrl-C reaches the tests, not the servers), writes to a log file, and
counts as started once its readiness probe succeeds. It ends with this process: at a regular exit by ``atexit``,
otherwise by the kernel's parent-death signal, which ``launcher.py`` requests.
"""

from __future__ import annotations

import atexit
import os
import pwd
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from mailboat_devservers.errors import ServerFailed

_LAUNCHER = Path(__file__).with_name("launcher.py")
_POLL = 0.02
_STILL_WITHIN = 10.0
"""Seconds that a process has to stop after SIGSTOP."""
_STILL = "TtZX"
"""The kernel's letters for a thread that does not run: stopped, traced, zombie, dead."""


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a server runs as; -1 is the current user."""

    uid: int
    gid: int

    @property
    def is_ours(self) -> bool:
        return self.uid < 0

    def own(self, path: Path) -> None:
        if not self.is_ours:
            os.chown(path, self.uid, self.gid)


OURSELVES = Account(-1, -1)


def unprivileged() -> Account:
    """Return the current user or, as root, an unprivileged user for servers that refuse to run as root."""
    if os.geteuid() != 0:
        return OURSELVES
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise ServerFailed("we are root, and there is neither a user `postgres` nor a user `nobody` for the servers")


def launch_command(command: Sequence[str], account: Account, death_signal: signal.Signals) -> list[str]:
    """Wrap the command in the launcher, which ties its lifetime to this process."""
    # -I -S: the launcher needs only the standard library and starts in a few milliseconds without site packages.
    launcher = [sys.executable, "-I", "-S", str(_LAUNCHER)]
    return [*launcher, str(os.getpid()), str(int(death_signal)), str(account.uid), str(account.gid), *command]


class Child:
    """One server process that can be killed, suspended and restarted with the same command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None,
        ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        account: Account = OURSELVES,
        death_signal: signal.Signals = signal.SIGKILL,
        start_timeout: float = 60.0,
    ) -> None:
        self.name = name
        self.log = log or _passing_log(name)
        self._command = launch_command(command, account, death_signal)
        self._ready = ready
        self._env = {**os.environ, **(env or {})}
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process and return once it is ready."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already, as process {self.pid}")
        with self.log.open("ab") as log:
            self._process = _spawn(self._command, self._env, log)
        _alive.add(self)
        deadline = time.monotonic() + self._start_timeout
        while not self._ready():
            status = self._process.poll()
            if status is not None:
                raise ServerFailed(f"{self.name} ended with status {status} before it was ready.\n{self.log_tail()}")
            if time.monotonic() > deadline:
                Child.kill(self)
                waited = f"{self._start_timeout:.0f} s"
                raise ServerFailed(f"{self.name} was not ready after {waited}.\n{self.log_tail()}")
            time.sleep(_POLL)

    def restart(self) -> None:
        """Stop the process if it runs, and start it with the same data and port."""
        self.stop()
        self.launch()

    def stop(self) -> None:
        """Send SIGTERM and wait for the process to end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, which acts like a crash: nothing is flushed, and clients get no notice."""
        if self._process is not None:
            _kill_group(self._process)

    def suspend(self) -> None:
        """Send SIGSTOP: connections stay open without responses. Return once all threads have stopped."""
        _signal_group(self.pid, signal.SIGSTOP)
        _until_still(self.pid)

    def resume(self) -> None:
        """Send SIGCONT."""
        _signal_group(self.pid, signal.SIGCONT)

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the log, for messages."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"The end of {self.log}:", *text])

    def _end(self, how: signal.Signals, grace: float = 120.0) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(how)
        self.resume()  # a suspended process would never handle the signal
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(
                f"{self.name} did not end within {grace:.0f} s and was killed.\n{self.log_tail()}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _passing_log(name: str) -> Path:
    """Create a log file for a server without its own folder; removed when this process ends."""
    handle, path = tempfile.mkstemp(prefix=f"{name.split()[0]}-", suffix=".log")
    os.close(handle)
    atexit.register(Path(path).unlink, missing_ok=True)
    return Path(path)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and all its descendants before any of them can react to the others' end."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # otherwise it would restart its killed children
    try:
        _until_still(process.pid)
    except ServerFailed:
        pass  # killed below in any case
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:  # ended by itself in the meantime
        descendants = []
    for descendant in descendants:
        try:
            descendant.kill()
        except psutil.NoSuchProcess:
            pass
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while not all(_is_over(descendant) for descendant in descendants) and time.monotonic() < deadline:
        time.sleep(_POLL)


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all its descendants; ignore processes that have ended.

    For SIGSTOP, return once all of them have stopped.
    """
    stopping = number == signal.SIGSTOP
    try:
        process = psutil.Process(pid)
        if stopping:
            # Stop the parent before listing its children: a child forked in between would never be stopped.
            process.send_signal(number)
            _until_still(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.send_signal(number)
        except psutil.NoSuchProcess:
            pass
    if stopping:
        for member in family:
            _until_still(member.pid)


def _until_still(pid: int) -> None:
    """Wait until all threads have stopped: SIGSTOP stops one after the other, over milliseconds."""
    deadline = time.monotonic() + _STILL_WITHIN
    while not _stands_still(pid):
        if time.monotonic() > deadline:
            raise ServerFailed(f"process {pid} still runs after SIGSTOP and {_STILL_WITHIN:.0f} s")
        time.sleep(_POLL / 10)


def _stands_still(pid: int) -> bool:
    """Return whether no thread of the process runs. An ended process counts as stopped."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True
    for thread in threads:
        try:
            text = (thread / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.rpartition(")")[2].split()[0] not in _STILL:  # after the name, which may contain any character
            return False
    return True


def _is_over(process: psutil.Process) -> bool:
    # Not a child of this process: after its death it stays a zombie until its adoptive parent reaps it.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # ended by itself in the meantime
        os.killpg(pid, number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGKILL)
    process.wait()


_alive: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for child in list(_alive):
        child.kill()


_Order = tuple[Sequence[str], Mapping[str, str], IO[bytes], "Future[subprocess.Popen[bytes]]"]
_orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
_spawner_lock = threading.Lock()
_spawner: threading.Thread | None = None


def _spawn(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lives as long as this process.

    The kernel sends the parent-death signal when the *thread* that started the child ends: a server restarted from a
    worker thread would die with that thread.
    """
    global _spawner
    with _spawner_lock:
        if _spawner is None or not _spawner.is_alive():  # not alive after a fork
            _spawner = threading.Thread(target=_serve_orders, name="devservers-spawner", daemon=True)
            _spawner.start()
    answer: Future[subprocess.Popen[bytes]] = Future()
    _orders.put((command, env, log, answer))
    return answer.result()


def _serve_orders() -> None:
    while True:
        command, env, log, answer = _orders.get()
        try:
            answer.set_result(
                subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        except OSError as error:
            answer.set_exception(error)
