"""Volumes as kubelet mounts them: files are links through ``..data``, which is replaced atomically."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

_NUMBERS = itertools.count(1)


class Volume:
    """A Secret or a ConfigMap in a pod, empty until ``fill``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def fill(self, files: Mapping[str, str]) -> str:
        """Replace the content atomically and return its version."""
        version = f"..2026_01_01_00_00_00.{next(_NUMBERS)}"
        fresh = self.folder / version
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_text(content)
        swapped = self.folder / "..data_tmp"
        swapped.symlink_to(version)
        swapped.replace(self.folder / "..data")
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        for link in list(self.folder.iterdir()):
            if not link.name.startswith("..") and link.name not in files:
                link.unlink()
        for old in self.folder.glob("..2026*"):
            if old.name != version:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()
        return version
