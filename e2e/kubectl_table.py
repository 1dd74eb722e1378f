"""Parser for the tables of ``kubectl get``. Columns begin where their heads begin, since cells may be empty."""

from __future__ import annotations

import re

Row = dict[str, str]


def tables(text: str) -> list[list[Row]]:
    """One table per kind: its rows by column."""
    return [_table(part) for part in text.strip("\n").split("\n\n")]


def _table(text: str) -> list[Row]:
    head, *lines = text.splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    cuts = list(zip(starts, [*starts[1:], None], strict=True))
    names = [head[a:b].strip() for a, b in cuts]
    return [dict(zip(names, (line[a:b].strip() for a, b in cuts), strict=True)) for line in lines]
