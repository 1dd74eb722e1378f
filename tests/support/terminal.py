"""Program on a pseudo-terminal, with its output and a keyboard."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Self

CTRL_C = b"\x03"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class Terminal:
    """Terminal of 120 columns by 40 lines, the controlling terminal of one process."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        without_size = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            # Ctrl-C becomes a signal only on the controlling terminal of a session.
            ["setsid", "--ctty", "--wait", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**without_size, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        self._drawn = bytearray()
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    @property
    def raw(self) -> str:
        """All output."""
        return self._drawn.decode(errors="replace")

    @property
    def text(self) -> str:
        """All output without control sequences, one frame after the other."""
        return _CONTROL.sub("", self.raw)

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def wait(self, timeout: float) -> int:
        """Wait for the end of the program and return its exit status."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._ours, 65536)
            except OSError:  # the program has closed the terminal
                return
            self._drawn += some

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.press(CTRL_C)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._reader.join(10)
        os.close(self._ours)
