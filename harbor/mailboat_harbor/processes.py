"""One place that starts server processes, so that there is one place that makes sure they end.

A ``Child`` has a process group and a session of its own (Ctrl-C reaches the tests, not the servers), writes to a log
file, is waited for until it really answers, and dies with us: at a regular exit by ``atexit``, at an irregular one by
the kernel's parent-death signal, which ``launcher.py`` asks for.
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

from mailboat_harbor.missing import ServerFailed

_LAUNCHER = Path(__file__).with_name("launcher.py")
_POLL = 0.02
_STILL_WITHIN = 10.0
"""Seconds that a process has to stop in once it was told to."""
_STILL = "TtZX"
"""The kernel's letters for a thread that runs no more: stopped, traced, a zombie, dead."""


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a server runs as; -1 is whoever we are."""

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
    """Ourselves, unless we are root: then a user that servers which refuse root can run as."""
    if os.geteuid() != 0:
        return OURSELVES
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise ServerFailed("we are root, and there is neither a user postgres nor a user nobody to run servers as")


def launch_command(command: Sequence[str], account: Account, death_signal: signal.Signals) -> list[str]:
    """The command behind the launcher, which ties it to this very process."""
    # -I -S: the launcher needs nothing but the standard library and starts in a few milliseconds without the rest.
    launcher = [sys.executable, "-I", "-S", str(_LAUNCHER)]
    return [*launcher, str(os.getpid()), str(int(death_signal)), str(account.uid), str(account.gid), *command]


class Child:
    """One server process that can be killed, suspended and started again under the same command."""

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
        """Start the process and return once it answers."""
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
        """Start again on the same data and port; stops it first if it still runs."""
        self.stop()
        self.launch()

    def stop(self) -> None:
        """Ask it to end, and wait until it did."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a crash would: nothing is flushed, nothing is said."""
        if self._process is not None:
            _kill_group(self._process)

    def suspend(self) -> None:
        """SIGSTOP: connections stay open and nobody answers. Returns once it stands still."""
        _signal_group(self.pid, signal.SIGSTOP)
        _until_still(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        _signal_group(self.pid, signal.SIGCONT)

    def log_tail(self, lines: int = 30) -> str:
        """The end of the log, for messages."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"The end of {self.log}:", *text])

    def _end(self, how: signal.Signals, grace: float = 120.0) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(how)
        self.resume()  # a suspended process would never see the request
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
    """A log file for a server without a folder of its own; gone when we are."""
    handle, path = tempfile.mkstemp(prefix=f"{name.split()[0]}-", suffix=".log")
    os.close(handle)
    atexit.register(Path(path).unlink, missing_ok=True)
    return Path(path)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all of its descendants, who get no chance to notice each other's end."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # or it would see its children die, and start new ones
    try:
        _until_still(process.pid)
    except ServerFailed:
        pass  # it is killed in any case
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:  # it has ended by itself just now
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
    """A signal to a process and all of its descendants. Those that are gone already don't mind.

    SIGSTOP: returns once all of them stand still.
    """
    stopping = number == signal.SIGSTOP
    try:
        process = psutil.Process(pid)
        if stopping:
            # Before its children are looked for: one that it forks meanwhile would never be stopped.
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
    """SIGSTOP stops one thread after the other, and the last ones may live on for milliseconds."""
    deadline = time.monotonic() + _STILL_WITHIN
    while not _stands_still(pid):
        if time.monotonic() > deadline:
            raise ServerFailed(f"process {pid} was told to stand still, and goes on after {_STILL_WITHIN:.0f} s")
        time.sleep(_POLL / 10)


def _stands_still(pid: int) -> bool:
    """Whether no thread of it runs. One that is gone does not."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True
    for thread in threads:
        try:
            text = (thread / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.rpartition(")")[2].split()[0] not in _STILL:  # behind the name, which may hold anything
            return False
    return True


def _is_over(process: psutil.Process) -> bool:
    # Not our child: once dead, it stays a zombie until whoever adopted it finds the time.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself just now
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
    """Start a process from the one thread that lives as long as we do.

    The parent-death signal comes when the *thread* that started the child ends: a server that was restarted from a
    worker thread would die with that thread.
    """
    global _spawner
    with _spawner_lock:
        if _spawner is None or not _spawner.is_alive():  # not alive: we are a fork of the process that had it
            _spawner = threading.Thread(target=_serve_orders, name="harbor-spawner", daemon=True)
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
