"""Detection of file changes by polling every second, which works on every Kubernetes volume type.

A mounted Secret or ConfigMap changes as a whole: kubelet writes a new folder beside the old one and swaps the link
``..data``. Through the links, inode and times of the files change at once. Versions of secrets may be reported, their
content never.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from mailboat.sinks.daemon_thread import in_a_thread

_POLL_EVERY: Final = 1.0
_SWAPPED: Final = "..data"


def version_of(path: Path, *, follow_symlinks: bool = True) -> tuple[int, int, int]:
    """Return a value that changes with the file. It includes the inode: a replacement may have equal time and size."""
    stat = path.stat(follow_symlinks=follow_symlinks)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def fingerprint(paths: Iterable[Path]) -> list[tuple[str, int, int, int]]:
    """Return a value that changes with any of the files, or any file of the folders."""
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        try:
            if not path.is_dir():
                found.append((str(path), *version_of(path)))
                continue
            link = path / _SWAPPED
            if os.path.lexists(link):  # kubelet swaps it per version: a changed secret may have identical files
                found.append((str(link), *version_of(link, follow_symlinks=False)))
            found += fingerprint(each for each in path.iterdir() if not each.name.startswith(".."))
        except OSError:
            continue  # treat as missing; the next poll finds it removed or readable
    return sorted(found)


async def watch(paths: Sequence[Path], changed: Callable[[], Awaitable[None]], *, seen: object = None) -> None:
    """Call ``changed`` when the files differ from ``seen``, and at each further change, until cancelled."""
    ended = threading.Event()
    try:
        while True:
            # In a thread, since a volume may hang. The event loop wakes up for changes only.
            seen = await in_a_thread(partial(_next_version, paths, seen, ended), "file-watch")
            await changed()
            await asyncio.sleep(_POLL_EVERY)
    finally:
        ended.set()


def _next_version(paths: Sequence[Path], seen: object, ended: threading.Event) -> object:
    """Block until the files differ from ``seen`` or the watch has ended. Return their fingerprint."""
    while (now := fingerprint(paths)) == seen and not ended.wait(_POLL_EVERY):
        pass
    return now


def secret_versions(folder: Path | None) -> dict[str, str]:
    """Return the mounted version of each secret: the name of kubelet's folder, else the time of the newest file."""
    versions: dict[str, str] = {}
    try:
        secrets = sorted(each for each in folder.iterdir() if not each.name.startswith(".")) if folder else []
    except OSError:
        return versions
    for secret in secrets:
        try:
            versions[secret.name] = os.readlink(secret / _SWAPPED)
        except OSError:
            if secret.is_dir() and (times := [time for _, time, _, _ in fingerprint([secret])]):
                versions[secret.name] = str(max(times))
    return versions
