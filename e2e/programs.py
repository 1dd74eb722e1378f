"""Run a program; the error of a failed one has the end of its output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from mailboat_devservers.errors import ServerFailed

_LAST_LINES = 30


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Return its standard output, or raise ``ServerFailed``. ``env`` is added to the environment."""
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
        raise ServerFailed(f"`{' '.join(command)}` ended with status {done.returncode}:\n{output}")
    return done.stdout
