"""One connection to Postgres: how it is opened, what is checked about the server, and how its errors are told.

Nothing here retries: a relay that loses its database drops what it has in memory and begins again
(``mailboat.runtime``), because after a failover nothing in memory can be trusted. Every operation has a deadline, so
that a server that went deaf is noticed like one that went away.

The server is told to have the same patience with us: a relay whose machine vanishes without a word would leave its
locks behind until TCP gives up, which by default takes hours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncCursor

from mailboat.errors import ConfigError, DatabaseUnavailable, MailboatError, SchemaMismatch

Row = tuple[Any, ...]
UrlProvider = Callable[[], str]
"""Asked anew for every connection, so that a rotated password is picked up."""


@dataclass(frozen=True, slots=True)
class Server:
    """Which database system a connection talks to."""

    system_identifier: int
    timeline: int
    version: int
    pooled: bool
    """A transaction pooler lies between: no session locks, no LISTEN, no prepared statements."""
    prepared_transactions: bool
    """Two-phase commit is enabled, and NOTIFY would forbid it."""


def explain(error: psycopg.Error) -> MailboatError:
    """The error of ours that says what a person should do about this one."""
    message = str(error).strip() or type(error).__name__
    match error:
        case psycopg.errors.UndefinedTable() | psycopg.errors.UndefinedColumn() | psycopg.errors.InvalidSchemaName():
            return SchemaMismatch(
                f"{message.splitlines()[0]}. Run `mailboat migrate` (or see what `mailboat verify` prints)."
            )
        case psycopg.errors.InsufficientPrivilege():
            return SchemaMismatch(
                f"{message.splitlines()[0]}. Grant the role of the relay's user: `grant mailboat_relay to <user>`."
            )
        case psycopg.errors.InvalidPassword() | psycopg.errors.InvalidAuthorizationSpecification():
            return DatabaseUnavailable(f"Postgres refused the log-in: {message}. Check the database Secret.")
    return DatabaseUnavailable(message)


@asynccontextmanager
async def explained(connection: AsyncConnection[Any] | None, deadline: float) -> AsyncIterator[None]:
    """Turns psycopg's errors into ours; past the deadline the connection is given up."""
    try:
        async with asyncio.timeout(deadline):
            yield
    except psycopg.Error as error:
        raise explain(error) from error
    except TimeoutError as error:
        if connection is not None:
            await connection.close()
        raise DatabaseUnavailable(f"Postgres did not answer within {deadline:.0f} s") from error


class Link:
    """A connection with a purpose. Closed for good after any failure."""

    def __init__(self, connection: AsyncConnection[Row], server: Server, deadline: float) -> None:
        self.connection = connection
        self.server = server
        self._deadline = deadline
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, url: UrlProvider, purpose: str, *, deadline: float = 30.0, pooler: str = "Auto") -> Link:
        """Connects, and refuses a server that must not be read from."""
        conninfo = url()
        try:
            async with asyncio.timeout(deadline):
                connection = await AsyncConnection.connect(
                    conninfo, autocommit=True, application_name=f"mailboat {purpose}", **libpq_settings(conninfo)
                )
        except psycopg.ProgrammingError as error:
            # The text of a malformed URL may hold a password, so libpq's message is not repeated.
            raise ConfigError(
                "the database URL is not one that libpq understands. It looks like"
                " postgresql://user:password@host:5432/dbname; special characters are percent-encoded."
            ) from error
        except psycopg.Error as error:
            raise explain(error) from error
        except TimeoutError as error:
            raise DatabaseUnavailable(f"no connection to Postgres within {deadline:.0f} s") from error
        try:
            async with explained(connection, deadline):
                server = await _identify(connection, pooler)
                if not server.pooled:
                    await connection.execute(SESSION_PATIENCE, patience(deadline))
        except BaseException:
            await connection.close()
            raise
        if server.pooled:
            connection.prepare_threshold = None
        return cls(connection, server, deadline)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncCursor[Row]]:
        """A transaction with a cursor whose results are binary."""
        async with (
            self._turn,
            explained(self.connection, self._deadline),
            self.connection.transaction(),
            self.connection.cursor(binary=True) as cursor,
        ):
            if self.server.pooled:  # settings of a session would be somebody else's next
                await cursor.execute(_TRANSACTION_PATIENCE, patience(self._deadline))
            yield cursor

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[AsyncCursor[Row]]:
        """Single statements, each on its own."""
        async with (
            self._turn,
            explained(self.connection, self._deadline),
            self.connection.cursor(binary=True) as cursor,
        ):
            yield cursor

    async def close(self) -> None:
        """Closes the connection. Safe to call twice."""
        await self.connection.close()


SESSION_PATIENCE = (
    "select set_config('idle_in_transaction_session_timeout', %(patience)s, false),"
    " set_config('tcp_user_timeout', %(patience)s, false),"
    " set_config('tcp_keepalives_idle', '10', false),"
    " set_config('tcp_keepalives_interval', '5', false),"
    " set_config('tcp_keepalives_count', '3', false)"
)
_TRANSACTION_PATIENCE = "select set_config('idle_in_transaction_session_timeout', %(patience)s, true)"


def patience(deadline: float) -> dict[str, str]:
    """How long the server is to wait for a relay that says nothing."""
    return {"patience": f"{deadline * 1000:.0f}ms"}


def libpq_settings(conninfo: str) -> dict[str, Any]:
    """Settings that a relay wants and a URL may overrule."""
    given = psycopg.conninfo.conninfo_to_dict(conninfo)
    wanted = {
        "target_session_attrs": "read-write",
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "client_encoding": "UTF8",
    }
    return {name: value for name, value in wanted.items() if name not in given}


def refuse_other_server(guard: Row | None, expected: Server) -> None:
    """Looks at what the ``guard`` statement of a transaction says: a pooler or proxy may hide a change of server."""
    if guard is None or guard[-2] or int(guard[-1], 16) != expected.timeline:
        raise DatabaseUnavailable("another server answers now (a failover): what was in memory is dropped")


async def _identify(connection: AsyncConnection[Row], pooler: str) -> Server:
    cursor = await connection.execute(
        "select pg_backend_pid(), pg_is_in_recovery(), current_setting('server_version_num')::int,"
        " current_setting('max_prepared_transactions')::int"
    )
    pid, in_recovery, version, prepared = _only(await cursor.fetchone())
    if in_recovery:
        raise DatabaseUnavailable(
            "this Postgres is a standby. Its snapshots leave out running transactions: use the primary."
        )
    if version < 140000:
        raise ConfigError(f"Postgres {version // 10000} is too old: Mailboat needs 14 or newer.")
    cursor = await connection.execute(
        "select (select system_identifier from pg_control_system()),"
        " left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
    )
    identifier, timeline = _only(await cursor.fetchone())
    pooled = pooler == "Transaction" or (pooler == "Auto" and pid != connection.info.backend_pid)
    return Server(identifier, int(timeline, 16), version, pooled, prepared > 0)


def _only(row: Row | None) -> Row:
    if row is None:
        raise DatabaseUnavailable("Postgres answered with no row where there must be one")
    return row
