"""First steps of a new user: a fresh clone, an empty home, the commands of the README and of the tutorial.

The tests use nothing of this environment except Python and the settings for the package index. The time until the first
event is printed only: it depends on the network and on the load of the machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mailboat_devservers.postgres import Database
from support.markdown import blocks

ROOT = Path(__file__).parents[2]
_KEPT = re.compile(r"PIP_(?!CACHE|TARGET|PREFIX|USER)|(HTTPS?|NO|ALL)_PROXY|SSL_|LANG|LC_|TERM", re.IGNORECASE)
_BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
_MARK = "@@ next block @@"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a user with a bare Python: no virtual environment, no package cache."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if _KEPT.match(name)}
    return kept | {"HOME": str(home), "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the last commit, without uncommitted changes."""
    folder = tmp_path / "mailboat"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_the_quick_start_shows_the_first_event(clone: Path, environment: dict[str, str], database: Database) -> None:
    page = (clone / "README.md").read_text(encoding="utf-8")
    shown = next(block for block in blocks(page, "") if "mailboat status" in block)
    commands = [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]
    script = "\n".join(["set -m", *commands, "wait"]).replace("postgresql://…", database.url)
    script = script.replace("mailboat run", "mailboat run --listen 127.0.0.1:0")  # port 8080 may be in use
    script = script.replace("status --wait", "status --wait --timeout 2m")  # so that a failure also ends the relay
    began = time.monotonic()
    first = None
    with subprocess.Popen(
        ["bash", "-c", script], cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as shell:
        assert shell.stdout is not None
        printed = []
        for line in shell.stdout:
            printed.append(line)
            if first is None and line.startswith('{"event_id"'):
                first = time.monotonic() - began
    assert first is not None, "".join(printed)
    assert "True   shop/orders-to-log  log   8/8    0 " in "".join(printed)
    print(f"first event after {first:.0f} s, installation included")  # noqa: T201 - shown with -s


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_the_tutorial_shows_the_printed_output(clone: Path, environment: dict[str, str], database: Database) -> None:
    page = (clone / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (install,) = blocks(page, "console")
    install = install.replace("postgresql://user:password@localhost:5432/dbname", database.url)
    assert database.url in install
    shown = _BLOCK.findall(page)
    assert len(shown) == 8
    script = "".join(["set -m\n", install, *(f"echo '{_MARK}'\n{commands}" for commands, _ in shown)])
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=860, check=False
    )
    told = f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, told
    assert "mailboat:" not in done.stderr, told
    printed = done.stdout.split(f"{_MARK}\n")[1:]
    for text, (commands, expected) in zip(printed, shown, strict=True):
        assert _without_chance(text) == _without_chance(expected), f"{commands}\n{told}"


def _without_chance(text: str) -> list[str]:
    """Return the lines without ids and times, and without bash's messages about its jobs."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\d[T ][\d:.]+Z?", "…", text)
    return [line.rstrip() for line in text.splitlines() if not re.match(r"\[\d\]|\w+ +\d+ +(Terminated|Done)", line)]
