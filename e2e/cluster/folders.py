"""A folder for each cluster, with its keys, and the search for folders of killed runs.

The owner of a folder holds a lock in it. A folder whose lock is free is abandoned.
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
    """Create a folder and remove it at the end of the block. Its name is a valid cluster name."""
    folder = Path(tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(3)}"
    folder.mkdir(mode=0o700)
    try:
        # Lock before rename, so that the search never finds the file of an owner without its lock.
        with (folder / f"{_OWNER}-to-be").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / _OWNER)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def abandoned_folders(prefix: str) -> Iterator[Path]:
    """Yield the folders of killed owners. Each is removed before the next one is yielded."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = (folder / _OWNER).open()
        except OSError:  # being created
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # in use
                continue
            yield folder
            shutil.rmtree(folder, ignore_errors=True)
