"""The examples of docs/emit.md run unchanged."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from mailboat import EmitRefused, NewEvent
from mailboat.emitter.validation import checked
from mailboat_devservers.postgres import Database
from support.markdown import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "emit.md").read_text(encoding="utf-8")


def test_the_examples_run(outbox: Database) -> None:
    users = [f"{name}_{outbox.name}" for name in ("shop_app", "shop_relay")]
    with psycopg.connect(outbox.url, autocommit=True) as connection:
        connection.execute("create table orders (id text primary key, state text)")
        connection.execute("insert into orders values ('o-1', 'new')")
        for user in users:
            connection.execute(sql.SQL("create role {} login").format(sql.Identifier(user)))
        try:
            for block in blocks(PAGE, "python"):
                exec(compile(block, "docs/emit.md", "exec"), {"connection": connection})
            for block in blocks(PAGE, "sql"):
                for name, user in zip(("shop_app", "shop_relay"), users, strict=True):
                    block = block.replace(name, user)
                for statement in block.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
        finally:
            for user in users:
                connection.execute(sql.SQL("drop role {}").format(sql.Identifier(user)))
        rows = connection.execute("select event_type, key from mailboat.outbox order by id").fetchall()
    assert rows == [("order.paid", "o-1")] + [("line.added", "o-1")] * 3 + [("order.paid", "o-1")] * 2 + [
        ("line.added", "o-1")
    ] * 2 + [("order.paid", "o-1")]


def test_the_documented_message_is_the_message_of_emit() -> None:
    with pytest.raises(EmitRefused) as refusal:
        checked(NewEvent("order.paid", key=""))
    assert f"    {refusal.value}\n" in PAGE
