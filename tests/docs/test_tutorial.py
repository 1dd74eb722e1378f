"""docs/tutorial.md, pasted block by block into one shell with an empty folder and database, prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mailboat_devservers.postgres import Database

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
MARK = "@@ block {} @@"


def without_chance(text: str) -> list[str]:
    """Without what differs from run to run: ids, times, and what bash says of its jobs."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\d[T ][\d:.]+Z?", "…", text)
    return [line.rstrip() for line in text.splitlines() if not re.match(r"\[\d\]|\w+ +\d+ +(Terminated|Done)", line)]


@pytest.mark.verify  # some twenty commands, each a process that imports the relay; the gate pastes the README's
@pytest.mark.timeout(900)
def test_the_tutorial_prints_what_it_shows(database: Database, tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == 8
    script = "set -m\n" + "".join(f"echo '{MARK.format(n)}'\n{commands}" for n, (commands, _) in enumerate(blocks))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAILBOAT_")}
    clean |= {"DATABASE_URL": database.url, "PATH": f"{Path(sys.executable).parent}:{clean['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=860, check=False
    )
    told = f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, told
    assert "mailboat:" not in done.stderr, told
    printed = re.split(r"@@ block \d+ @@\n", done.stdout)[1:]
    assert len(printed) == len(blocks), told
    for shown, (commands, expected) in zip(printed, blocks, strict=True):
        assert without_chance(shown) == without_chance(expected), f"{commands}\n{told}"
