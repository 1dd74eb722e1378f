"""Migrated databases: one template per server, which is copied in a tenth of the time of a migration."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, date, datetime
from typing import Any

import psycopg
from psycopg import sql

from mailboat.store.connection import PostgresConnection
from mailboat.store.schema.migrate import apply_migrations
from mailboat_devservers.postgres import Database, PostgresServer
from support.wait import until_midnight_is_over

OUTBOX = "mailboat.outbox"

_templates: dict[tuple[int, date], str] = {}
"""By server and day, since the time partitions of a template begin on the day of its creation."""


def migrated_database(server: PostgresServer) -> Iterator[Database]:
    """Generator for a fixture: a new database with the outbox ``mailboat.outbox``, dropped afterwards."""
    until_midnight_is_over()
    name = f"outbox_{secrets.token_hex(6)}"
    server.create_database(name, template=_template(server))
    yield Database(server, name)
    server.drop_database(name)


def _template(server: PostgresServer) -> str:
    made_for = (server.port, datetime.now(UTC).date())
    if made_for not in _templates:
        name = f"migrated_{secrets.token_hex(6)}"
        server.create_database(name, template="template0")
        asyncio.run(_migrate(server.url(name)))
        _templates[made_for] = name
    return _templates[made_for]


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await apply_migrations(connection, OUTBOX)


@asynccontextmanager
async def connected(url: str, name: str = "test", **options: Any) -> AsyncIterator[PostgresConnection]:
    """Open a connection of the store, and close it after the block."""
    link = await PostgresConnection.open(lambda: url, name, **options)
    try:
        yield link
    finally:
        await link.close()


@contextmanager
def logged_in(database: Database, group: str) -> Iterator[str]:
    """Create a user with the privileges of the group only, and yield the URL of the user."""
    name = f"{group}_{database.name}"
    database.execute(sql.SQL("create role {} login in role {}").format(sql.Identifier(name), sql.Identifier(group)))
    yield database.url_for(name)
    database.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))
