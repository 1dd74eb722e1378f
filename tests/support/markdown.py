"""What tests read out of a page: its fenced blocks and the cells of its tables."""

from __future__ import annotations

import re


def blocks(page: str, language: str) -> list[str]:
    """The texts of all fences that are marked with a language; with "", of those that are marked with none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of the first table after a text, without its header."""
    table = re.search(r"\n((?:\|.*\n)+)", page.split(title, 1)[1])
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]
