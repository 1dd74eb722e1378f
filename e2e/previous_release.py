"""The version to upgrade from: the sources of the last release or, without a release, of an earlier commit.

They come from the history of this checkout. A shallow clone or an archive has no history, hence no earlier version.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from mailboat_devservers.cache import made_once
from readme import ROOT

_FIRST_MIGRATION = "relay/mailboat/store/schema/migrations/0001_schema"
_INSTALLED = ("charts", "crds", "operator", "relay")
"""Installed folders. A revision with the same content is no earlier version."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A whole checkout of an earlier revision."""

    name: str
    """Its tag, or the commit and its subject."""
    folder: Path


def earlier_version() -> Earlier | None:
    """The newest revision that installs something else, or None."""
    revision = first_that_differs()
    if revision is None:
        return None
    commit = _git("rev-parse", f"{revision}^{{commit}}").decode().strip()

    def check_out(into: Path) -> None:
        with tarfile.open(fileobj=BytesIO(_git("archive", commit))) as files:
            files.extractall(into, filter="data")

    name = revision if revision != commit else _git("log", "-1", "--format=%h %s", commit).decode().strip()
    return Earlier(name, made_once(f"earlier-{commit[:16]}", check_out))


def first_that_differs(root: Path = ROOT) -> str | None:
    """The first revision whose installed folders differ.

    If the commits after a release change nothing that it installs, that is the release before it.
    """
    equal = ("diff", "--quiet")
    return next((each for each in revisions(root) if not _git_succeeds(root, *equal, each, "--", *_INSTALLED)), None)


def revisions(root: Path = ROOT) -> list[str]:
    """Releases before this commit, the newest first; then the last commit that changed the first migration.

    The current version can't upgrade the databases of older commits, which have another first migration.
    """
    if shutil.which("git") is None or not (root / ".git").exists():
        return []
    first = _git("log", "-1", "--first-parent", "--format=%H", "--", _FIRST_MIGRATION, root=root).decode().split()
    before = ("--merged=HEAD", "--no-contains=HEAD", *(f"--contains={each}" for each in first))
    tags = _git("tag", "--list", "v*", *before, "--sort=-v:refname", root=root).decode().split()
    # A shallow clone has one commit, which seems to have added everything.
    head = _git("rev-parse", "HEAD", root=root).decode().split()
    return [*tags, *(each for each in first if each not in head)]


def _git(*arguments: str, root: Path = ROOT) -> bytes:
    return subprocess.run(_command(root, *arguments), cwd=root, check=True, capture_output=True).stdout


def _git_succeeds(root: Path, *arguments: str) -> bool:
    return subprocess.run(_command(root, *arguments), cwd=root, check=False, capture_output=True).returncode == 0


def _command(root: Path, *arguments: str) -> list[str]:
    # Root runs the cluster, and the checkout may belong to another user.
    return ["git", "-c", f"safe.directory={root}", *arguments]
