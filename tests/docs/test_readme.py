"""The README matches the behaviour: its manifest, its commands, its table, its code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import psycopg

import mailboat
from mailboat_devservers.postgres import Database
from support.markdown import blocks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAPTOP = ROOT / "examples" / "laptop"


def test_the_manifest_is_the_example() -> None:
    assert (LAPTOP / "orders.yaml").read_text(encoding="utf-8") in blocks(README, "yaml")


def test_the_session_on_a_laptop_begins_with_the_installation_of_the_command() -> None:
    shown = next(block for block in blocks(README, "") if "mailboat status" in block)
    assert shown.index(".venv/bin/activate") < shown.index("$ mailboat ")


def test_the_packages_that_pip_installs_exist() -> None:
    wanted = re.findall(r"^pip install (.*?)(?: +#.*)?$", README, re.MULTILINE)
    assert wanted
    for requirements in wanted:
        for requirement in shlex.split(requirements):
            folder, _, extras = requirement.partition("[")
            assert folder.startswith("./"), "nothing is published: a name would be somebody else's package"
            project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set(filter(None, extras.rstrip("]").split(","))) <= set(project.get("optional-dependencies", ()))


def test_the_topics_of_the_example_are_created_first() -> None:
    (block,) = blocks(README, "sh")
    example = (ROOT / "examples" / "kubernetes" / "orders-to-kafka.yaml").read_text(encoding="utf-8")
    assert re.findall(r"--create --topic (\S+)", block) == re.findall(r"topic: ([\w.]+)", example)


def test_the_commands_on_kubernetes_are_whole() -> None:
    block = next(block for block in blocks(README, "") if "helm install" in block)
    install, *others = block.splitlines()
    assert {"image.repository", "relay.image.repository"} <= set(re.findall(r"--set ([\w.]+)=", install))
    assert others[0] == "kubectl create namespace shop"
    assert all(line.startswith("kubectl --namespace shop ") for line in others[1:])


def test_the_code_runs(outbox: Database) -> None:
    with psycopg.connect(outbox.url, autocommit=True) as connection:
        connection.execute("create table orders (id text primary key, state text)")
        for block in blocks(README, "python"):
            exec(compile(block, "README.md", "exec"), {"connection": connection, "mailboat": mailboat})
        for block in blocks(README, "sql"):
            for statement in filter(str.strip, block.split(";\n")):
                connection.execute(statement.encode())
        emitted = connection.execute("select event_type, key from mailboat.outbox").fetchall()
    assert emitted == [("order.paid", "o-1")] * 2


def without_chance(line: str) -> str:
    """Return the line without values that vary between runs.

    These are ids, times and the rate, which is unknown if the relay responds slowly.
    """
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT[\d:.]+Z|(\d\.\d/s|-)$", "…", line)


def test_the_pasted_quick_start_prints_the_documented_output(database: Database) -> None:
    """All commands are pasted at once, on a new database: no command may depend on a pause before it."""
    shown = next(block for block in blocks(README, "") if "mailboat status" in block)
    commands = [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]
    assert [command.split()[0] for command in commands[:2]] == ["python3", "pip"]
    del commands[:2]  # test_fresh_clone.py runs them
    script = "\n".join(["set -m", *commands, "wait"]).replace("postgresql://…", database.url)
    # Use a free port, because relays of other tests may use the default one.
    script = script.replace("mailboat run", "mailboat run --relay-id laptop-8c41f2 --listen 127.0.0.1:0")
    script = script.replace("status --wait", "status --wait --timeout 90s")  # so that a failure also ends the relay
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAILBOAT_")}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=200, check=False
    )
    assert "mailboat:" not in done.stderr
    expected = [line for line in shown.splitlines() if not line.startswith("$ ")]
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[1]")]  # bash's messages about the job
    # Another process prints the event, before or after the lines around it.
    assert sorted(map(without_chance, printed)) == sorted(map(without_chance, expected)), done.stderr
