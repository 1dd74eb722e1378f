"""FastStream on the same topic, with the same empty handler.

FastStream is no dependency of Mailboat. The benchmark installs it into a temporary folder, beside the clients of this
environment. If that is not possible, the row is left out and the reason is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from measurement import Measured

_PACKAGES = ("faststream==0.7.8", "fast-depends==3.0.9", "anyio==4.16.0", "idna==3.20")
_INSTALL_WITHIN = 120
_RUN_WITHIN = 600


class LeftOut(Exception):
    """Error with the reason why FastStream cannot be measured on this machine."""


@contextmanager
def installed() -> Iterator[Path]:
    """Install FastStream into a folder and remove it at the end. Raise ``LeftOut`` if that fails."""
    with TemporaryDirectory(prefix="faststream-") as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--target", folder, *_PACKAGES], {}, _INSTALL_WITHIN)
        yield Path(folder)


def consume(folder: Path, bootstrap: str, topic: str, events: int) -> Measured:
    """Handle a number of events in a separate process. The first tenth is not measured.

    Raise ``LeftOut`` if the process fails.
    """
    program = Path(__file__).with_name("faststream_program.py")
    paths = os.pathsep.join([str(folder), str(program.parent)])
    answer = _run([sys.executable, str(program), bootstrap, topic, str(events)], {"PYTHONPATH": paths}, _RUN_WITHIN)
    return Measured(**json.loads(answer.splitlines()[-1]))


def _run(command: list[str], environment: dict[str, str], within: int) -> str:
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=within, check=False
        )
    except subprocess.TimeoutExpired:
        raise LeftOut(f"it took more than {within} s") from None
    if done.returncode:
        raise LeftOut((done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1][:200])
    return done.stdout
