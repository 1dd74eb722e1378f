"""The README's section about Kubernetes: its commands and the output that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from support.markdown import blocks

ROOT = Path(__file__).parents[1]


def commands() -> list[list[str]]:
    """Commands in order, each as program and arguments."""
    return [shlex.split(line) for line in _blocks()[0].splitlines()]


def status_command() -> list[str]:
    return shlex.split(_blocks()[1].splitlines()[0].removeprefix("$ "))


def status_output() -> str:
    return _blocks()[1].partition("\n")[2]


def topics() -> dict[str, int]:
    """Kafka topics that the README creates, with their numbers of partitions."""
    [text] = blocks(_section(), "sh")
    made = re.findall(r"^kafka-topics\.sh .*--create --topic (\S+) --partitions (\d+)$", text, re.MULTILINE)
    assert len(made) == len(text.splitlines()), f"not only commands that create topics: {text}"
    return {name: int(partitions) for name, partitions in made}


def _blocks() -> list[str]:
    found = blocks(_section(), "")
    assert len(found) == 2, "one block of commands and one of output; all others are marked as sh"
    return found


def _section() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## On Kubernetes$(.*?)^## ", readme, re.MULTILINE | re.DOTALL)
    assert section, "the README has no section `On Kubernetes`"
    return section[1]
