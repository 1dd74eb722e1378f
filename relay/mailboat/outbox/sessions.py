"""Settings of every session that Mailboat opens, pinned in one place.

A session inherits settings from its role and its database (``alter database … set …``), and some of them lose events,
run other people's code or stop a relay. So every session sets all that matter itself:

- directly connected: once, at connect;
- behind a pooler in transaction mode: at the beginning of every transaction, for that transaction only, because the
  server's session belongs to another client next. A single statement gets a transaction of its own there.

Whoever opens a connection for Mailboat opens it here (`Session`) or calls `pins` (blocking connections).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, AsyncTransaction
from psycopg.pq import TransactionStatus

Row = tuple[Any, ...]

BEGIN: Final[LiteralString] = "begin isolation level read committed read write"
"""Isolation and access mode of a transaction can't be set in it, once a query has run: so they are said with BEGIN."""

_PINNED: Final[Mapping[str, str]] = {
    # Functions, operators and tables of other schemas are called by their full names only. pg_temp stands last, or it
    # would come first.
    "search_path": "pg_catalog, pg_temp",
    # A serializable relay makes business transactions fail (G10); with snapshots of a whole transaction, retention
    # decides on what was so before it had its lock (G1).
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # A policy that hides rows raises an error instead: a hidden event would be skipped for ever (G1).
    "row_security": "off",
    # What has a limit is given up by Mailboat, which knows what it does; the measuring of a backlog has none.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    # How values and names are written and read.
    "DateStyle": "ISO, YMD",
    "TimeZone": "UTC",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
}
_SINCE: Final[Mapping[str, int]] = {"idle_session_timeout": 140000, "transaction_timeout": 170000}
"""Settings that older servers do not have."""

_SOCKET: Final[Mapping[str, str]] = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


def pins(version: int, deadline: float, *, local: bool) -> bytes:
    """The statement that sets all of them, for the transaction (``local``) or for the session.

    ``deadline``: seconds that the server waits for a relay that says nothing in the middle of a transaction.
    """
    patience = f"{deadline * 1000:.0f}ms"
    values = {name: value for name, value in _PINNED.items() if version >= _SINCE.get(name, 0)}
    values["idle_in_transaction_session_timeout"] = patience
    if not local:
        values |= {"tcp_user_timeout": patience, **_SOCKET}
    scope = "true" if local else "false"
    calls = [f"pg_catalog.set_config('{name}', '{value}', {scope})" for name, value in values.items()]
    return f"select {', '.join(calls)}".encode()


class Session(AsyncConnection[Row]):
    """A connection whose every statement runs under the pinned settings.

    It counts as pooled, and pins each transaction, until `settle` has heard otherwise.
    """

    pooled = True
    deadline = 30.0

    @classmethod
    async def open(cls, conninfo: str, *, purpose: str, deadline: float) -> Self:
        """Connect. Raises psycopg's errors."""
        session = await cls.connect(
            conninfo, autocommit=True, application_name=f"mailboat {purpose}", **libpq_settings(conninfo)
        )
        session.deadline = deadline
        session.cursor_factory = _PinnedCursor
        await session.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        await session.set_read_only(False)
        return session

    async def settle(self, *, pooled: bool) -> None:
        """Pin the session's own settings, if there is a session."""
        if not pooled:
            await self.execute(pins(self.info.server_version, self.deadline, local=False))
        self.pooled = pooled

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[AsyncTransaction]:
        """Behind a pooler, a transaction pins its settings first."""
        outermost = self.info.transaction_status is TransactionStatus.IDLE
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            if self.pooled and outermost:
                await AsyncCursor(self).execute(pins(self.info.server_version, self.deadline, local=True))
            yield transaction


class _PinnedCursor(AsyncCursor[Row]):
    """Behind a pooler, a single statement gets a transaction, in which its settings are pinned."""

    async def execute(self, *arguments: Any, **options: Any) -> Self:
        session = self.connection
        assert isinstance(session, Session)
        if session.pooled and session.info.transaction_status is TransactionStatus.IDLE:
            async with session.transaction():
                return await super().execute(*arguments, **options)
        return await super().execute(*arguments, **options)


def libpq_settings(conninfo: str) -> dict[str, Any]:
    """Settings of the connection that a URL may overrule, but for the encoding of texts.

    Raises psycopg's ``ProgrammingError`` for a URL that is not understood, or would be misunderstood: libpq would take
    a part of the password for something else, and name it in its errors.

    Of several hosts the primary is chosen. ``read-write``, which users write for the same purpose, would refuse a
    primary whose database is read-only by default, and that is pinned.
    """
    given = psycopg.conninfo.conninfo_to_dict(conninfo)
    if "://" in conninfo and _shows_password(conninfo, given):
        raise psycopg.ProgrammingError("a character of the password is not percent-encoded")
    if given.get("target_session_attrs") == "read-write":
        del given["target_session_attrs"]
    wanted = {
        "target_session_attrs": "primary",
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    return {name: value for name, value in wanted.items() if name not in given} | {"client_encoding": "UTF8"}


def _shows_password(url: str, given: Mapping[str, Any]) -> bool:
    """Whether the rest of a password, behind an ``@`` or ``/`` in it, stands where host, port or database are."""
    places = (str(given.get(name) or "") for name in ("host", "dbname"))
    numbers = str(given.get("port") or "0").split(",")
    return any("@" in place and place in url for place in places) or not all(n.isdigit() for n in numbers if n)
