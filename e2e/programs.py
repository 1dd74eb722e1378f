"""Programs that are run for what they do, not for what they say: one that fails tells the end of what it printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from mailboat_devservers.errors import ServerFailed

_LAST_LINES = 30


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What it printed; ``env`` is added to ours. Raises ``ServerFailed``."""
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
        raise ServerFailed(f"`{' '.join(command)}` ended with status {done.returncode}:\n{said}")
    return done.stdout
