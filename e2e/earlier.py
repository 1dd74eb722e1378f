"""What is upgraded from: the sources of the last release, or of an earlier commit while there is none.

Taken from the history of this checkout. A clone without depth, or an archive, has none of that: then there is nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from mailboat_harbor.cache import made_once
from readme import ROOT

_NEEDED = ("charts/mailboat/Chart.yaml", "Dockerfile.operator", "Dockerfile.relay")
_INSTALLED = ("charts", "crds", "operator", "relay")
"""What an upgrade is about: if none of it differs, there is nothing to upgrade from."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A whole checkout of an earlier revision."""

    name: str
    """For people: its tag, or the commit and its subject."""
    folder: Path


def earlier_version() -> Earlier | None:
    revision = _revision()
    if revision is None or _git_says_yes("diff", "--quiet", revision, "--", *_INSTALLED):
        return None
    commit = _git("rev-parse", f"{revision}^{{commit}}").decode().strip()

    def check_out(into: Path) -> None:
        with tarfile.open(fileobj=BytesIO(_git("archive", commit))) as files:
            files.extractall(into, filter="data")

    name = revision if revision != commit else _git("log", "-1", "--format=%h %s", commit).decode().strip()
    return Earlier(name, made_once(f"earlier-{commit[:16]}", check_out))


def _revision() -> str | None:
    """The last tag before this commit; while there is none, the first commit that could be installed at all."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    before = ("--merged=HEAD", "--no-contains=HEAD")
    tags = _git("tag", "--list", "v*", *before, "--sort=-v:refname").decode().split()
    # The newest that added one of the files which it takes: from there on all of them are there.
    first = _git("log", "-1", "--first-parent", "--diff-filter=A", "--format=%H", "--", *_NEEDED).decode().split()
    return next(iter([*tags, *first]), None)


def _git(*arguments: str) -> bytes:
    return subprocess.run(_command(*arguments), cwd=ROOT, check=True, capture_output=True).stdout


def _git_says_yes(*arguments: str) -> bool:
    return subprocess.run(_command(*arguments), cwd=ROOT, check=False, capture_output=True).returncode == 0


def _command(*arguments: str) -> list[str]:
    # The checkout may be another user's: root runs the cluster.
    return ["git", "-c", f"safe.directory={ROOT}", *arguments]
