"""Fresh databases that are migrated already: made once per server, then copied, which takes a tenth of the time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import psycopg

from mailboat.outbox.migrate import migrate
from mailboat_harbor.postgres import Database, PostgresServer

OUTBOX = "mailboat.outbox"

_templates: dict[tuple[int, int], str] = {}


def migrated_database(server: PostgresServer) -> Iterator[Database]:
    """A generator for a fixture: a fresh database with the outbox ``mailboat.outbox``, dropped afterwards."""
    name = f"outbox_{secrets.token_hex(6)}"
    server.create_database(name, template=_template(server))
    yield Database(server, name)
    server.drop_database(name)


def _template(server: PostgresServer) -> str:
    server_process = (server.port, server.pid)
    if server_process not in _templates:
        name = f"migrated_{secrets.token_hex(6)}"
        server.create_database(name, template="template0")
        asyncio.run(_migrate(server.url(name)))
        _templates[server_process] = name
    return _templates[server_process]


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await migrate(connection, OUTBOX)
