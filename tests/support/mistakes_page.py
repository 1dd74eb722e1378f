"""The mistakes of ``docs/mistakes.md``, with the messages that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"


class Mistake(NamedTuple):
    """One section of the page."""

    title: str
    manifest: str
    answer: str


def mistakes(chapter: str) -> list[Mistake]:
    found = re.search(rf"^## {chapter}$(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE} has no chapter {chapter}"
    sections = re.findall(r"^### (.+?)$.*?```yaml\n(.*?)```.*?```text\n(.*?)\n```", found[1], re.MULTILINE | re.DOTALL)
    return [Mistake(*section) for section in sections]
