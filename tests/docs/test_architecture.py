"""docs/architecture.md: every function that it names exists in the given file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.markdown import rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = {
    "\n## Event path": (ROOT / "relay" / "mailboat", 50),
    "\n## Resource path": (ROOT / "operator" / "mailboat_operator", 102),
}
"""Folder of the files, and the maximum number of hops."""


def functions(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


@pytest.mark.parametrize("heading", PATHS)
def test_every_hop_is_a_function_of_its_file(heading: str) -> None:
    folder, most = PATHS[heading]
    hops = rows(PAGE, heading)
    assert [row[0] for row in hops] == [str(number) for number in range(1, len(hops) + 1)]
    assert len(hops) <= most
    missing = [(file, name) for _, file, name, _ in hops if name.strip("`") not in functions(folder / file.strip("`"))]
    assert missing == []
