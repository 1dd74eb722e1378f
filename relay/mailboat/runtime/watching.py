"""Watching files by looking at them every second: the way that works on every volume Kubernetes knows.

A mounted Secret or ConfigMap changes as a whole: kubelet writes a new folder beside the old one and swaps the link
``..data``. Whoever follows links sees the file's inode and times change at once. The versions of secrets are told to
whoever asks, their content never.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

LOOK_EVERY: Final = 1.0
"""Seconds."""
_SWAPPED: Final = "..data"


def version_of(path: Path) -> tuple[int, int, int]:
    """What changes when the file does. The inode, too: one that is put in its place may have the same time and size.

    Raises ``OSError`` where there is none.
    """
    stat = path.stat()  # follows links: in a pod the file is one
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def fingerprint(paths: Sequence[Path]) -> object:
    """What changes when one of the files, or a file of one of the folders, does."""
    return tuple(sorted(_fingerprints(paths)))


def _fingerprints(paths: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        try:
            if path.is_dir():
                # kubelet's own mark of a version: a secret may change and have the same files again.
                found += _fingerprints_of_link(path / _SWAPPED)
                found += _fingerprints([each for each in path.iterdir() if not each.name.startswith("..")])
                continue
            found.append((str(path), *version_of(path)))
        except OSError:
            continue  # as good as not there; gone the next time, or readable
    return found


def _fingerprints_of_link(link: Path) -> list[tuple[str, int, int, int]]:
    try:
        stat = link.lstat()
    except OSError:
        return []
    return [(str(link), stat.st_mtime_ns, stat.st_size, stat.st_ino)]


async def watch(
    paths: Sequence[Path],
    changed: Callable[[], Awaitable[None]],
    *,
    seen: object = None,
    every: float = LOOK_EVERY,
) -> None:
    """Calls back when the files are not as ``seen`` any more, and again at each further change. Until cancelled."""
    while True:
        now = await asyncio.to_thread(fingerprint, paths)  # a volume may hang
        if now != seen:
            seen = now
            await changed()
        await asyncio.sleep(every)


def secret_versions(folder: Path | None) -> dict[str, str]:
    """By secret: which version of it lies there. The name of kubelet's folder, else the time of the newest file."""
    versions: dict[str, str] = {}
    try:
        secrets = sorted(each for each in folder.iterdir() if not each.name.startswith(".")) if folder else []
    except OSError:
        return versions
    for secret in secrets:
        try:
            versions[secret.name] = os.readlink(secret / _SWAPPED)
        except OSError:
            times = [time for _, time, _, _ in _fingerprints([secret])] if secret.is_dir() else []
            if times:
                versions[secret.name] = str(max(times))
    return versions
