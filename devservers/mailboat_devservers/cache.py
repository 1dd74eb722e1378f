"""Cache of built and fetched parts between runs.

Several test workers may request the same part concurrently. One worker builds it under a file lock, in a folder beside
its final place, and renames the folder when it is complete. An existing part is therefore complete.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """Return ``$MAILBOAT_CACHE``, or ``mailboat`` in the user's cache folder. Create it if it does not exist."""
    chosen = os.environ.get("MAILBOAT_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mailboat"
    base.mkdir(parents=True, exist_ok=True)
    return base


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder ``name`` of the cache. If it does not exist, ``make`` fills it.

    The name must identify the content completely (a version, a hash of the sources): a part is never rebuilt under the
    same name.
    """
    place = cache_dir() / name
    if place.exists():
        return place
    with (cache_dir() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        _clear_away(name)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".part", dir=cache_dir()))
        try:
            make(unfinished)
            unfinished.chmod(0o755)
            unfinished.rename(place)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return place


def _clear_away(name: str) -> None:
    """Remove leftovers of builds that were ended by a signal. The caller holds the lock, so no build is running."""
    left_behind = re.compile(rf"{re.escape(name)}\.[^.]+\.part")  # not those of a part with a longer name
    for entry in cache_dir().iterdir():
        if left_behind.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
