"""A folder for each cluster, with its keys in it; and how those of runs that were killed are found.

Its owner holds a lock in there for as long as it lives: a folder whose lock can be had belongs to nobody any more.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER = "owner"


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """Ours for as long as the block lasts. Its name is good enough for a cluster."""
    folder = Path(tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(3)}"
    folder.mkdir(mode=0o700)
    try:
        # Locked first, then named: nobody ever finds a lock that its owner has yet to take.
        with (folder / f"{_OWNER}-to-be").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / _OWNER)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def abandoned_folders(prefix: str) -> Iterator[Path]:
    """Those whose owners were killed. They are removed when the caller is done with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = (folder / _OWNER).open()
        except OSError:  # somebody has only just made it
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # somebody has it
                continue
            yield folder
            shutil.rmtree(folder, ignore_errors=True)
