"""Where built and fetched parts live between runs, and how they get there once, whole, whoever comes first.

Several test workers may want the same part at the same moment: one builds it under a file lock, in a folder beside its
final place, and renames it when it is complete. A part that exists is therefore complete.
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
    """``$MAILBOAT_CACHE``, else ``mailboat`` in the user's cache folder. Created when it is not there."""
    chosen = os.environ.get("MAILBOAT_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mailboat"
    base.mkdir(parents=True, exist_ok=True)
    return base


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache; ``make`` fills it if it does not exist yet.

    The name must hold everything that the content depends on (a version, a hash of the sources): a part is never made
    again under the same name.
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
    """What a make left that was ended by a signal: whoever holds the lock knows that nobody fills it any more."""
    left_behind = re.compile(rf"{re.escape(name)}\.[^.]+\.part")  # and not that of a part whose name goes on
    for entry in cache_dir().iterdir():
        if left_behind.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
