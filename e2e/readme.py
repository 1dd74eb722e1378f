"""The README's section about Kubernetes: the commands that it tells people to type, and what it shows them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from support.markdown import blocks

ROOT = Path(__file__).parents[1]


def commands() -> list[list[str]]:
    """What a reader types, in order: program and arguments."""
    return [shlex.split(line) for line in _blocks()[0].splitlines()]


def question() -> list[str]:
    """What a reader asks afterwards."""
    return shlex.split(_blocks()[1].splitlines()[0].removeprefix("$ "))


def answer() -> str:
    """And is shown."""
    return _blocks()[1].partition("\n")[2]


def topics() -> dict[str, int]:
    """The topics of Kafka that a reader makes before, with their partitions."""
    [text] = blocks(_section(), "sh")
    made = re.findall(r"^kafka-topics\.sh .*--create --topic (\S+) --partitions (\d+)$", text, re.MULTILINE)
    assert len(made) == len(text.splitlines()), f"that is all that has to be there: {text}"
    return {name: int(partitions) for name, partitions in made}


def _blocks() -> list[str]:
    found = blocks(_section(), "")
    assert len(found) == 2, "and in there commands, and what they lead to; what else is needed is marked as sh"
    return found


def _section() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## On Kubernetes$(.*?)^## ", readme, re.MULTILINE | re.DOTALL)
    assert section, "the README has a section about Kubernetes"
    return section[1]
