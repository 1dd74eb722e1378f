"""docs/existing-table.md, from its first statement to the first delivered event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from mailboat.cli.main import main
from mailboat.store.table import renamed
from mailboat_devservers.postgres import Database
from mailboat_spec import Columns
from mailboat_spec.base import yaml_name
from support.cli import RunningRelay
from support.markdown import blocks
from support.wait import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "existing-table"
PAGE = (ROOT / "docs" / "existing-table.md").read_text(encoding="utf-8")


def test_the_reference_lists_the_columns_of_the_preset() -> None:
    reference = (ROOT / "docs" / "resources.md").read_text(encoding="utf-8")
    columns = renamed(Columns(preset="debezium"))
    for name, column in columns.items():
        field = "aggregateId and key" if name in ("aggregate_id", "key") else yaml_name(name)
        assert f"{field}: {column}" in reference


@pytest.fixture
def roles(database: Database) -> Iterator[tuple[str, str]]:
    """Names of the relay's role, and of an application's role that can write only to its own table."""
    relay, writer = f"shop_relay_{database.name}", f"shop_app_{database.name}"
    database.execute(sql.SQL("create role {} login").format(sql.Identifier(writer)))
    yield relay, writer
    for name in (relay, writer):
        database.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def test_the_existing_table_is_delivered_as_documented(
    database: Database, roles: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_user, writer = roles
    (example,) = blocks(PAGE, "yaml")
    assert (EXAMPLE / "orders.yaml").read_text(encoding="utf-8").split("\n", 1)[1] == example
    monkeypatch.setenv("MAILBOAT_SECRET_ORDERS_DB_URL", database.url)
    create, addition = blocks(PAGE, "sql")
    migrated, lacking, complete = blocks(PAGE, "")

    def command(line: str) -> Result:
        arguments = line.removeprefix("$ mailboat ").replace("examples/existing-table", str(EXAMPLE)).split()
        return CliRunner().invoke(main, arguments)

    def printed(shown: str) -> None:
        line, _, output = shown.partition("\n")
        assert command(line).output == output

    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("create schema shop")
        connection.execute(create.encode())
        connection.execute(
            "insert into shop.outboxevent (aggregatetype, aggregateid, type, payload)"
            " values ('order', 'o-0', 'order.placed', '{}')"
        )
        connection.execute(f"grant usage on schema shop to {writer}".encode())
        connection.execute(f"grant insert on shop.outboxevent to {writer}".encode())
        made = command(migrated.splitlines()[0].partition(" > ")[0])
        assert made.exit_code == 0
        connection.execute(made.stdout.encode())
        printed(lacking)
        for statement in filter(str.strip, addition.replace("shop_relay", relay_user).split(";\n")):
            connection.execute(statement.encode())
    printed(complete)

    monkeypatch.setenv("MAILBOAT_SECRET_ORDERS_DB_URL", database.url_for(relay_user))
    printed(complete)
    relay = RunningRelay(["-f", str(EXAMPLE)], tmp_path / "relay.log")
    try:
        relay.wait_ready()
        with psycopg.connect(database.url_for(writer)) as connection:
            connection.execute(
                "insert into shop.outboxevent (aggregatetype, aggregateid, type, payload)"
                """ values ('order', 'o-1', 'order.placed', '{"order": "o-1", "path": "c:\\\\d"}')"""
            )
        wait_until(lambda: '"published": 1' in relay.get("/status")[1], what="the event to be delivered")
        with psycopg.connect(database.url) as connection:
            connection.execute(complete.splitlines()[-1].strip().encode())
        wait_until(lambda: '"published": 2' in relay.get("/status")[1], what="the row from before")
        assert [line["message"] for line in relay.lines() if line["level"] != "info"] == []
    finally:
        assert relay.stop() == 0
    (first, second) = database.execute(
        "select payload::text, convert_from(payload_bytes, 'UTF8') from shop.outboxevent"
    )
    assert first[0] == first[1]
    assert second[0] == second[1]
