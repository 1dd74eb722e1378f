"""What the README shows is what happens: its manifest, its commands, its table, its code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import mailboat
from mailboat_harbor.postgres import Database, PostgresServer
from support.cli import RunningRelay
from support.databases import migrated_database
from support.markdown import blocks
from support.wait import wait_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAPTOP = ROOT / "examples" / "laptop"


@pytest.fixture
def outbox(postgres: PostgresServer) -> Iterator[Database]:
    yield from migrated_database(postgres)


def test_the_manifest_is_the_example() -> None:
    assert (LAPTOP / "orders.yaml").read_text(encoding="utf-8") in blocks(README, "yaml")


def test_the_session_on_a_laptop_begins_with_what_brings_the_command() -> None:
    shown = next(block for block in blocks(README, "") if "mailboat status" in block)
    assert shown.index(".venv/bin/activate") < shown.index("$ mailboat ")


def test_what_pip_is_told_to_install_is_here() -> None:
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
    """Without what differs from run to run: ids and times."""
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT[\d:.]+Z", "…", line)


def test_the_session_on_a_laptop_prints_what_is_shown(
    outbox: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAILBOAT_SECRET_ORDERS_DB_URL", outbox.url)
    monkeypatch.setenv("COLUMNS", "120")

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "mailboat.cli.main", *arguments, "-f", str(LAPTOP)],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ),
        )
        return done.stdout.strip()

    shown = next(block for block in blocks(README, "") if "mailboat status" in block)
    table = "\n".join(line for line in shown.splitlines() if line.startswith(("READY", "True")))
    arrival = next(line for line in shown.splitlines() if line.startswith('{"event_id"'))
    printed = tmp_path / "printed.jsonl"
    relay = RunningRelay(["-f", str(LAPTOP), "--relay-id", "laptop"], tmp_path / "relay.log", printed)
    try:
        relay.wait_ready()
        event = command("emit", "order.placed", '{"order": "o-1", "total": "12.50"}', "--key", "o-1")
        assert re.fullmatch(r"[0-9a-f-]{36}", event)
        wait_until(lambda: '"published": 1' in relay.get("/status")[1], what="the event to be delivered")
        assert without_chance(printed.read_text()) == without_chance(arrival) + "\n"
        assert event in printed.read_text()
        same = wait_until(
            lambda: re.sub(r"\d\.\d/s", "0.0/s", command("status")) == table, timeout=60, what="the table of the README"
        )
        assert same
    finally:
        assert relay.stop() == 0
