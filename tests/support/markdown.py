"""Parser for fenced blocks and tables of Markdown pages."""

from __future__ import annotations

import re


def blocks(page: str, language: str) -> list[str]:
    """Return the texts of all fenced blocks with that language; "" selects blocks without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def rows(page: str, title: str) -> list[list[str]]:
    """Return the cells of the first table after a text, without the header."""
    table = re.search(r"\n((?:\|.*\n)+)", page.split(title, 1)[1])
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]
