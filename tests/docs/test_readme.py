"""What the README shows is what happens: its manifest, its commands, its table, its code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml

import mailboat
from commandline import RunningRelay
from mailboat_harbor.postgres import Database, PostgresServer
from mailboat_spec import read_documents
from migrated import migrated_database
from waiting import wait_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAPTOP = ROOT / "examples" / "laptop"


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.fixture
def outbox(postgres: PostgresServer) -> Iterator[Database]:
    yield from migrated_database(postgres)


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"


def test_every_manifest_of_the_examples_is_valid() -> None:
    files = sorted((ROOT / "examples").rglob("*.yaml"))
    assert files
    for file in files:
        documents = [(f"{file.name}, document {n}", d) for n, d in enumerate(yaml.safe_load_all(file.read_text()), 1)]
        assert read_documents(documents).subscriptions


def test_the_manifest_is_the_example() -> None:
    assert (LAPTOP / "orders.yaml").read_text(encoding="utf-8") in blocks("yaml")


def test_the_code_runs(outbox: Database) -> None:
    with psycopg.connect(outbox.url, autocommit=True) as connection:
        connection.execute("create table orders (id text primary key, state text)")
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec"), {"connection": connection, "mailboat": mailboat})
        for block in blocks("sql"):
            for statement in filter(str.strip, block.split(";\n")):
                connection.execute(statement.encode())
        emitted = connection.execute("select event_type, key from mailboat.outbox").fetchall()
    assert emitted == [("order.paid", "o-1")] * 2


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

    shown = next(block for block in blocks("") if "mailboat status" in block)
    table = "\n".join(line for line in shown.splitlines() if line.startswith(("READY", "True")))
    relay = RunningRelay(["-f", str(LAPTOP), "--relay-id", "laptop"], tmp_path / "relay.log")
    try:
        relay.wait_ready()
        event = command("emit", "order.placed", '{"order": "o-1", "total": "12.50"}', "--key", "o-1")
        assert re.fullmatch(r"[0-9a-f-]{36}", event)
        wait_until(lambda: '"published": 1' in relay.get("/status")[1], timeout=30, what="the event to be delivered")
        same = wait_until(
            lambda: re.sub(r"\d\.\d/s", "0.0/s", command("status")) == table, timeout=60, what="the table of the README"
        )
        assert same
    finally:
        assert relay.stop() == 0
