"""Parser of the lock files."""

from __future__ import annotations

import re
from pathlib import Path

_LOCKS = Path(__file__).parents[2] / "locks"


def locked(name: str) -> dict[str, str]:
    """Return the versions by package in ``locks/<name>.txt``."""
    text = (_LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9.-]+)(?:\[[^]]*\])?==([^\s;\\]+)", text, re.MULTILINE))
