"""The how-to pages: code runs if its libraries are installed, and options and metrics exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click import Context
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import create_engine

from mailboat.cli.main import main
from mailboat.http.metrics import StatusCollector
from mailboat_devservers.postgres import Database
from support.markdown import blocks
from support.relay_statuses import relay

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = blocks((DOCS / "how-to-python.md").read_text(encoding="utf-8"), "python")


@pytest.fixture
def outbox(outbox: Database) -> Database:
    outbox.execute("create table orders (id text primary key, state text)")
    outbox.execute("insert into orders values ('o-1', 'new')")
    return outbox


def code(about: str) -> dict[str, Any]:
    """Execute the block of the page that contains this text, and return its names."""
    (block,) = [each for each in PYTHON if about in each]
    names: dict[str, Any] = {}
    exec(compile(block, "how-to-python.md", "exec"), names)
    return names


def test_all_python_is_python() -> None:
    for block in PYTHON:
        compile(block, "how-to-python.md", "exec")


def test_sqlalchemy_emits_in_its_transaction(outbox: Database) -> None:
    engine = create_engine(outbox.url.replace("postgresql://", "postgresql+psycopg://"))
    code("sqlalchemy")["pay"](engine, "o-1")
    engine.dispose()
    rows = outbox.execute("select event_type, key, (select state from orders) from mailboat.outbox")
    assert rows == [("order.paid", "o-1", "paid")]


async def test_fastapi_emits_in_the_transaction_of_the_request(
    outbox: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", outbox.url)
    place = code("from fastapi")["place"]
    answer = await place("o-2", 5)
    assert outbox.execute("select event_id::text, key from mailboat.outbox") == [(answer["event"], "o-2")]
    with pytest.raises(psycopg.errors.UniqueViolation):
        await place("o-2", 5)
    assert outbox.execute("select count(*) from mailboat.outbox") == [(1,)]


def test_a_test_of_a_producer_leaves_nothing_behind(outbox: Database) -> None:
    with psycopg.connect(outbox.url) as connection:
        code("check_payment")["check_payment"](connection)
    assert outbox.execute("select count(*) from mailboat.outbox") == [(0,)]


def test_alembic_ignores_the_schema_of_mailboat() -> None:
    include_name = code("def include_name")["include_name"]
    assert [include_name(name, "schema", {}) for name in (None, "shop", "mailboat")] == [True, True, False]
    assert include_name("mailboat", "table", {})


@pytest.mark.parametrize("statement", ["$1::jsonb, key => $2", "?::jsonb, key => ?"])
def test_other_languages_emit_by_sql(outbox: Database, statement: str) -> None:
    page = (DOCS / "how-to-languages.md").read_text(encoding="utf-8")
    (call,) = set(re.findall(rf"select mailboat\.emit\('order\.paid', {re.escape(statement)}\)", page))
    for placeholder in ("$1", "$2", "?", "?"):
        call = call.replace(placeholder, "%s", 1)
    with psycopg.connect(outbox.url) as connection:
        connection.execute(call.encode(), ['{"order": "o-1"}', "o-1"])
    assert outbox.execute("select key, convert_from(payload, 'UTF8') from mailboat.outbox") == [
        ("o-1", '{"order": "o-1"}')
    ]


def test_the_options_of_the_unit_and_of_the_container_exist() -> None:
    page = (DOCS / "how-to-run.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?:bin/mailboat|mailboat-relay) (run .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    run = main.get_command(Context(main), "run")
    assert run is not None
    for command in commands:
        run.make_context("run", [*command.split()[1:], "-f", "mailboat.yaml"])


def test_the_metrics_that_are_named_exist() -> None:
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: [relay()]))
    rendered = generate_latest(registry).decode()
    page = (DOCS / "how-to-grafana.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`(mailboat_\w+)`", page)):
        assert f"\n# TYPE {name} " in rendered, name
