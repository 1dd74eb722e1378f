"""Settings of every session that Mailboat opens, pinned in one place.

A session inherits settings from its role and its database (``alter database … set …``). Some of them lose events, run
foreign code or stop a relay. Every session therefore sets all relevant ones itself:

- Direct connection: once, at connect.
- Behind a pooler in transaction mode: at the beginning of every transaction, for that transaction only, because the
  server session serves another client next. A single statement is wrapped in a transaction.

All connections are opened by `PinnedConnection`, or call `pins` (blocking connections).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, AsyncTransaction
from psycopg.pq import TransactionStatus

Row = tuple[Any, ...]

BEGIN: Final[LiteralString] = "begin isolation level read committed read write"
"""Isolation and access mode can't be set after the first query of a transaction, so BEGIN sets them."""

_PINNED: Final[Mapping[str, str]] = {
    # Functions, operators and tables of other schemas need qualified names. Unless pg_temp is listed, it is searched
    # first; so it is listed last.
    "search_path": "pg_catalog, pg_temp",
    # A serializable relay makes business transactions fail (G10). Under repeatable read, retention would decide by a
    # snapshot from before it acquired its lock (G1).
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # A policy that would hide rows raises an error instead: a hidden event would never be delivered (G1).
    "row_security": "off",
    # Mailboat applies its own time-outs. The measurement of a backlog has none.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    # Text format of values and names.
    "DateStyle": "ISO, YMD",
    "TimeZone": "UTC",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
}
_SINCE: Final[Mapping[str, int]] = {"idle_session_timeout": 140000, "transaction_timeout": 170000}
"""First server version that has the setting."""

_KEEPALIVES: Final = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
"""Of both ends of the connection."""

_IDLE_IN_TRANSACTION: Final = 10.0
"""Seconds. Shorter than a lease."""


def pins(version: int, deadline: float, *, local: bool) -> bytes:
    """Return the statement that sets all pinned settings, for the transaction (``local``) or for the session.

    ``deadline``: seconds after which the server gives up a client that does not acknowledge data. A session that is
    idle in a transaction ends sooner, because its locks would delay the takeover of a hung relay's partitions.
    """
    values = {name: value for name, value in _PINNED.items() if version >= _SINCE.get(name, 0)}
    values["idle_in_transaction_session_timeout"] = f"{min(deadline, _IDLE_IN_TRANSACTION) * 1000:.0f}ms"
    if not local:
        values["tcp_user_timeout"] = f"{deadline * 1000:.0f}ms"
        values |= {f"tcp_{name}": str(value) for name, value in _KEEPALIVES.items()}
    scope = "true" if local else "false"
    calls = [f"pg_catalog.set_config('{name}', '{value}', {scope})" for name, value in values.items()]
    return f"select {', '.join(calls)}".encode()


class PinnedConnection(AsyncConnection[Row]):
    """A connection that runs every statement with the pinned settings.

    Until `settle` is called, the session counts as pooled and pins each transaction.
    """

    pooled = True
    deadline = 30.0

    @classmethod
    async def open(cls, conninfo: str, *, purpose: str, deadline: float) -> Self:
        """Connect. Errors of psycopg are not translated."""
        settings = {"application_name": f"mailboat {purpose}", **libpq_settings(conninfo)}
        session = await cls.connect(conninfo, autocommit=True, cursor_factory=_PinnedCursor, **settings)
        session.deadline = deadline
        await session.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        await session.set_read_only(False)
        return session

    async def settle(self, *, pooled: bool) -> None:
        """Set whether the connection is pooled. If it is not, pin the settings for the whole session."""
        if not pooled:
            await self.execute(pins(self.info.server_version, self.deadline, local=False))
        self.pooled = pooled

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[AsyncTransaction]:
        outermost = self.info.transaction_status is TransactionStatus.IDLE
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            if self.pooled and outermost:
                await AsyncCursor(self).execute(pins(self.info.server_version, self.deadline, local=True))
            yield transaction


class _PinnedCursor(AsyncCursor[Row]):
    async def execute(self, *arguments: Any, **options: Any) -> Self:
        session = self.connection
        assert isinstance(session, PinnedConnection)
        if session.pooled and session.info.transaction_status is TransactionStatus.IDLE:
            async with session.transaction():
                return await super().execute(*arguments, **options)
        return await super().execute(*arguments, **options)


def libpq_settings(conninfo: str) -> dict[str, Any]:
    """Return the default connection settings that the URL does not set, and the client encoding in any case.

    Raises psycopg's ``ProgrammingError`` if the URL is malformed, or if libpq would take a part of the password for
    host, port or database and print it in its errors. ``read-write`` is replaced by ``primary``: it would refuse a
    primary whose database is read-only by default, although the session overrides that default.
    """
    configured = psycopg.conninfo.conninfo_to_dict(conninfo)
    if "://" in conninfo and _shows_password(conninfo, configured):
        raise psycopg.ProgrammingError("a character of the password is not percent-encoded")
    if configured.get("target_session_attrs") == "read-write":
        del configured["target_session_attrs"]
    defaults: dict[str, Any] = {"target_session_attrs": "primary", "connect_timeout": 10, **_KEEPALIVES}
    return {name: value for name, value in defaults.items() if name not in configured} | {"client_encoding": "UTF8"}


def _shows_password(url: str, configured: Mapping[str, Any]) -> bool:
    """Return True if host, port or database contain the rest of a password after an ``@`` or ``/`` in it."""
    places = (str(configured.get(name) or "") for name in ("host", "dbname"))
    numbers = str(configured.get("port") or "0").split(",")
    return any("@" in place and place in url for place in places) or not all(n.isdigit() for n in numbers if n)
