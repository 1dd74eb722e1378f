"""``mailboat.migrate`` as a function for set-up scripts and tests, for synchronous and asynchronous callers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from mailboat.store.schema.migrate import MigrationReport
from mailboat.store.schema.migrate import migrate as apply_migrations


def migrate(database: Any, outbox: str = "mailboat.outbox") -> MigrationReport:
    """Migrate a database to the schema that this version needs, as ``mailboat migrate`` does. Idempotent.

    ``database``: a URL, or a connection of psycopg, SQLAlchemy (or its engine) or Django, whose server and user are
    used. The migration has a separate connection and transaction, so nothing of the caller is committed.
    """
    work = _migrate(_conninfo(database), outbox)
    with ThreadPoolExecutor(1, "mailboat-migrate") as thread:  # the caller may be inside an event loop
        return thread.submit(asyncio.run, work).result()


async def _migrate(conninfo: str, outbox: str) -> MigrationReport:
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
        return await apply_migrations(connection, outbox)


def _conninfo(database: Any) -> str:
    if isinstance(database, str):
        scheme, separator, rest = database.partition("://")
        return f"{scheme.partition('+')[0]}{separator}{rest}" if separator else database
    if isinstance(database, psycopg.Connection | psycopg.AsyncConnection):
        return make_conninfo(database.info.dsn, password=database.info.password or None)
    if hasattr(database, "get_connection_params"):  # Django, whose parameters include some of its own
        known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
        given = database.get_connection_params()
        return make_conninfo(**{name: value for name, value in given.items() if name in known and value is not None})
    engine = getattr(database, "engine", database)
    return _conninfo(engine.url.render_as_string(hide_password=False))
