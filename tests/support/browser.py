"""Headless Chromium: the document that it renders, and a screenshot."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mailboat_devservers.errors import PartMissing

_NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_TIMEOUT = 200.0
"""Seconds. A start takes two; a busy machine may take a hundred times as long."""


@dataclass(frozen=True, slots=True)
class Browser:
    """One program and one profile. Each call starts a browser and stops it."""

    program: str
    profile: Path

    @classmethod
    def find(cls, profile: Path) -> Browser:
        """Return the browser that is installed."""
        for name in _NAMES:
            if found := shutil.which(name):
                return cls(found, profile)
        raise PartMissing("Chromium: apt-get install chromium")

    def document(self, address: str) -> str:
        """Return the document as HTML, after it has loaded."""
        return self._run("--dump-dom", address).decode()

    def picture(self, address: str, width: int, height: int) -> bytes:
        """Return a screenshot of the window as PNG."""
        file = self.profile.with_suffix(".png")
        self._run(f"--screenshot={file}", f"--window-size={width},{height}", address)
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG")
        return content

    def _run(self, *arguments: str) -> bytes:
        command = [self.program, *_FLAGS, f"--user-data-dir={self.profile}", *arguments]
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT
        ).stdout
