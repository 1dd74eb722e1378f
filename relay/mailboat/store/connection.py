"""One connection to Postgres: opening, checks of the server, and translation of errors.

Occasional statements run in the event loop (``transaction``, ``autocommit``), frequent ones in the thread of the
connection (``pipeline``, ``read``).

Nothing here retries: a relay that loses its database restarts its session (``mailboat.runtime``), because after a
failover no state in memory can be trusted. Every operation has a deadline, so that a hung server is detected like an
unavailable one. The server gets the same time-outs for the relay, or else the locks of a relay whose machine vanished
would stay until TCP gives up, which takes hours by default.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, LiteralString, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, sql
from psycopg.generators import send
from psycopg.pq.abc import PGconn

from mailboat.errors import ConfigError, DatabaseUnavailable, InRecovery, MailboatError, SchemaMismatch
from mailboat.store.session_settings import BEGIN, PinnedConnection, pins
from mailboat.store.session_settings import Row as Row
from mailboat.store.sql import statements
from mailboat_spec import Pooler
from mailboat_spec.redaction import primary_message

# If a connection breaks in a pipeline, the error of the connection is reported; psycopg's extra log line is noise.
logging.getLogger("psycopg").addFilter(lambda record: not record.getMessage().startswith("error ignored"))

T = TypeVar("T")
Statement = LiteralString | bytes | sql.SQL | sql.Composed
_READ_ONLY: Final[LiteralString] = "begin isolation level repeatable read read only"
_GUARD: Final = statements("windows")["guard"]

UrlProvider = Callable[[], str]
"""Called for every connection, so that a rotated password is picked up."""


@dataclass(frozen=True, slots=True)
class Server:
    """Identity and properties of the database system behind a connection."""

    system_identifier: int
    timeline: int
    version: int
    pooled: bool
    """A transaction pooler is in between: no session locks, no LISTEN, no prepared statements."""
    prepared_transactions: bool
    """Two-phase commit is enabled. A transaction that runs NOTIFY can't be prepared."""
    process: int
    """Server process of the connection. If it changes, there is a pooler in between."""

    @property
    def identity(self) -> tuple[int, int]:
        return self.timeline, self.system_identifier


_USE_THE_PRIMARY = (
    "This Postgres is a standby, and its snapshots leave out running transactions: use the primary, or name all servers"
    " in the database URL, as in postgresql://user@one:5432,two:5432/dbname."
)
_ANSWER_OF_A_STANDBY = "server is in hot standby mode"
"""Libpq's error if none of the hosts is a primary."""
_HIDDEN_ROWS = (
    "A policy may hide events from the relay's user, and a hidden event would never be delivered. Exempt the user"
    " (`alter role <user> bypassrls`), or `alter table <outbox> disable row level security`."
)


def explain(error: psycopg.Error) -> MailboatError:
    """Translate a psycopg error into a Mailboat error that names the remedy, if one is known."""
    message = primary_message(error)
    match error:
        case psycopg.errors.UndefinedTable() | psycopg.errors.UndefinedColumn() | psycopg.errors.InvalidSchemaName():
            return SchemaMismatch(f"{message}. Run `mailboat migrate` (or see what `mailboat verify` prints).")
        case psycopg.errors.InsufficientPrivilege() if error.diag.source_function == "check_enable_rls":
            return SchemaMismatch(f"{message}. {_HIDDEN_ROWS}")
        case psycopg.errors.InsufficientPrivilege():
            remedy = error.diag.message_hint or "Grant the user its role: `grant mailboat_relay to <user>`."
            return SchemaMismatch(f"{message}. {remedy}")
        case psycopg.errors.InvalidPassword() | psycopg.errors.InvalidAuthorizationSpecification():
            return DatabaseUnavailable(f"Postgres refused the log-in: {message}. Check the database Secret.")
        case psycopg.OperationalError() if message.endswith(_ANSWER_OF_A_STANDBY):
            return InRecovery(f"{message}. {_USE_THE_PRIMARY}")
    return DatabaseUnavailable(message)


async def first_row(
    cursor: AsyncCursor[Row], statement: Statement, parameters: Mapping[str, object] | None = None
) -> Row | None:
    await cursor.execute(statement, parameters)
    return await cursor.fetchone()


@asynccontextmanager
async def explained(connection: AsyncConnection[Any] | None, deadline: float) -> AsyncIterator[asyncio.Timeout]:
    """Translate psycopg's errors into Mailboat errors. Past the deadline, close the connection."""
    try:
        async with asyncio.timeout(deadline) as timeout:
            yield timeout
    except psycopg.Error as error:
        raise explain(error) from error
    except TimeoutError as error:
        if connection is not None:
            await connection.close()
        raise DatabaseUnavailable(f"Postgres did not answer within {deadline:.0f} s") from error


class Pipeline:
    """A transaction whose statements are sent without waiting for results, until a result is fetched."""

    def __init__(self, connection: Connection[Row], server: Server) -> None:
        self.server = server
        self._connection = connection
        self._sending: AbstractContextManager[object] | None = None
        """Psycopg's pipeline, from the first statement to the wait for the results. To leave it costs no round trip of
        its own, because that sends the sync which the wait needs."""

    def wait(self) -> None:
        """Wait for the results of all statements sent so far. Must be called before any fetch.

        The sync makes the server session idle in transaction. Without it, a transaction whose relay vanished counts as
        active for as long as the connection lasts, and ``idle_in_transaction_session_timeout`` never ends it.

        The output buffer is flushed first, because psycopg's sync only reads. If a large event fills the socket buffer,
        the rest would stay unsent while client and server wait for each other.
        """
        if self._sending is not None:
            self._connection.wait(send(self._connection.pgconn))
            self.leave()

    def send(self, statement: str | bytes | sql.Composed, parameters: Any = None) -> Cursor[Row]:
        """Send a statement and return its cursor, with binary results."""
        # No pipeline behind a pooler: not every version of every pooler keeps a pipeline together.
        if self._sending is None and not self.server.pooled:
            sending = self._connection.pipeline()
            sending.__enter__()
            self._sending = sending
        return self._connection.cursor(binary=True).execute(statement, parameters)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave psycopg's pipeline. After an error, discard the results of the statements sent."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


class ConnectionThread:
    """Runner of one operation at a time. The caller must not start a second one.

    psycopg's blocking calls cost less than half of its awaitable ones, because a thread that waits inside libpq does
    not use the event loop. A thread can't be cancelled, but its socket can be shut down. This happens if the task that
    waits for the thread is cancelled: past its deadline, or if the session ends during an operation.
    """

    def __init__(self, purpose: str, pgconn: PGconn) -> None:
        self._purpose = purpose
        self._pgconn = pgconn
        self._thread: ThreadPoolExecutor | None = None
        self._at_work: Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work``, which must only raise errors of Mailboat or psycopg, and return its result."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"mailboat-{self._purpose}")
        self._at_work = self._thread.submit(work)
        done = asyncio.wrap_future(self._at_work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self.cut()
            with suppress(MailboatError, psycopg.Error):
                await done
            raise

    def close(self) -> None:
        """Shut the thread down. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            # The socket of a busy thread was shut down, so the thread ends. Waiting for it would block the event loop.
            thread.shutdown(wait=self._at_work is None or self._at_work.done())

    def cut(self) -> None:
        """Shut the socket down. The running operation fails as if the server had become unavailable."""
        if self._pgconn.status != psycopg.pq.ConnStatus.BAD:
            with suppress(OSError), socket.socket(fileno=self._pgconn.socket) as peer:
                try:
                    peer.shutdown(socket.SHUT_RDWR)
                finally:
                    peer.detach()  # libpq keeps the descriptor


class PostgresConnection:
    """A connection with one purpose. Not reusable after a failure."""

    def __init__(
        self, connection: PinnedConnection, purpose: str, server: Server, deadline: float, *, waits_for_standbys: bool
    ) -> None:
        self.connection = connection
        self.server = server
        self._deadline = deadline
        self._waits_for_standbys = waits_for_standbys
        self._turn = asyncio.Lock()
        self._timeout: asyncio.Timeout | None = None
        self._blocking: Connection[Row] | None = None
        self._notification = asyncio.Event()
        self._listener: int | None = None
        """Copy of the socket's descriptor that is watched for notifications."""
        self._thread = ConnectionThread(purpose, connection.pgconn)

    @classmethod
    async def open(
        cls,
        url: UrlProvider,
        purpose: str,
        *,
        deadline: float = 30.0,
        pooler: Pooler = Pooler.AUTO,
        waits_for_standbys: bool = True,
    ) -> PostgresConnection:
        """Connect, and refuse a server that must not be read from.

        ``waits_for_standbys`` is false for a relay's bookkeeping, which a failover invalidates anyway: a hung standby
        must not stop heartbeats. Other commits are as durable as the server's settings require.
        """
        conninfo = url()
        try:
            async with asyncio.timeout(deadline):
                connection = await PinnedConnection.open(conninfo, purpose=purpose, deadline=deadline)
        except psycopg.ProgrammingError as error:  # its message may contain a password
            raise ConfigError(
                "the database URL is not one that libpq understands. It looks like"
                " postgresql://user:password@host:5432/dbname; special characters such as @ and / are percent-encoded."
            ) from error
        except psycopg.Error as error:
            raise explain(error) from error
        except TimeoutError as error:
            raise DatabaseUnavailable(f"no connection to Postgres within {deadline:.0f} s") from error
        try:
            async with explained(connection, deadline):
                async with connection.transaction():
                    server = await _identified(connection, pooler)
                await connection.settle(pooled=server.pooled)
                if not server.pooled and not waits_for_standbys:
                    await connection.execute("set synchronous_commit = local")
        except BaseException:
            await connection.close()
            raise
        # Two psycopg interfaces share this connection (see ``_pipeline``) and would give the same names to their
        # prepared statements. Only the one for frequent work, the blocking one, prepares.
        connection.prepare_threshold = None
        return cls(connection, purpose, server, deadline, waits_for_standbys=waits_for_standbys)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncCursor[Row]]:
        """Run a transaction. The cursor has binary results."""
        async with (
            self._turn,
            explained(self.connection, self._deadline) as self._timeout,
            self.connection.transaction(),
            self.connection.cursor(binary=True) as cursor,
        ):
            if self.server.pooled and not self._waits_for_standbys:
                await cursor.execute("set local synchronous_commit = local")
            yield cursor

    def take_time(self) -> None:
        """Remove the deadline of the open transaction, for work whose duration grows with the data.

        TCP keepalives still detect an unavailable server. A hung server is not detected.
        """
        if self._timeout is not None:
            self._timeout.reschedule(None)

    async def pipeline(self, work: Callable[[Pipeline], T], *, one_transaction: bool = True) -> T:
        """Run ``work`` in a thread: in one transaction, or in one per wait."""

        def run() -> T:
            with self._pipeline(BEGIN if one_transaction else None) as pipeline:
                return work(pipeline)

        async with self._turn, explained(None, self._deadline):
            return await self._thread.run(run)

    async def read(self, work: Callable[[Pipeline], Callable[[], T]], *, no_deadline: bool = False) -> T:
        """Run ``work`` in a read-only transaction, then the callable it returned, both in a thread.

        All statements see the same snapshot. With ``no_deadline``, TCP keepalives on this connection and heartbeats on
        another one detect an unavailable server.
        """

        def run() -> T:
            with self._pipeline(_READ_ONLY) as pipeline:
                guard = pipeline.send(_GUARD) if self.server.pooled else None
                answer = work(pipeline)
            if guard is not None:
                refuse_other_server(guard.fetchone(), self.server)
            return answer()

        async with self._turn, explained(None, self._deadline) as timeout:
            if no_deadline:
                timeout.reschedule(None)
            return await self._thread.run(run)

    @contextmanager
    def _pipeline(self, begin: LiteralString | None) -> Iterator[Pipeline]:
        """Run a transaction as a pipeline. Unfetched results are awaited too, and their errors are raised.

        If ``begin`` is None (never behind a pooler), each ``wait`` commits the statements sent since the previous one.
        """
        if self._blocking is None:
            self._blocking = Connection(self.connection.pgconn)
            self._blocking.autocommit = True
            if self.server.pooled:
                self._blocking.prepare_threshold = None
        pipeline = Pipeline(self._blocking, self.server)
        try:
            if begin is not None:
                pipeline.send(begin)
            if self.server.pooled:
                pipeline.send(pins(self.server.version, self._deadline, local=True))
            yield pipeline
            if begin is not None:
                pipeline.send("commit")
            pipeline.wait()
        except BaseException as error:
            pipeline.leave(error)
            if not self._blocking.closed:
                self._blocking.rollback()
            raise

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[AsyncCursor[Row]]:
        """Yield a cursor for single statements, each committed separately."""
        async with (
            self._turn,
            explained(self.connection, self._deadline),
            self.connection.cursor(binary=True) as cursor,
        ):
            yield cursor

    async def fetch(self, statement: Statement, parameters: Mapping[str, object] | None = None) -> list[Row]:
        """Run a single statement, committed separately, and return its rows, if any."""
        async with self.autocommit() as cursor:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []

    async def listen(self, channel: LiteralString, payload: str) -> None:
        """Note notifications of the channel with this payload from now on."""

        def note(notification: psycopg.Notify) -> None:
            if notification.payload == payload:
                self._notification.set()

        self.connection.add_notify_handler(note)
        await self.fetch(sql.SQL("listen {}").format(sql.Identifier(channel)))
        # psycopg watches the socket itself during a statement, so this watches a copy of its descriptor.
        self._listener = os.dup(self.connection.pgconn.socket)
        asyncio.get_running_loop().add_reader(self._listener, self._on_readable)

    async def notified(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a notification. Return True if one arrived since the last call.

        psycopg's own wait wakes up ten times a second, and keeps other statements off the connection meanwhile.
        """
        try:
            self._receive()  # the end of a statement may have read one; raises the error of a connection that ended
        except psycopg.Error as error:
            raise explain(error) from error
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._notification.wait()
        arrived = self._notification.is_set()
        self._notification.clear()
        return arrived

    def _receive(self) -> None:
        """Read notifications that the server sent while no statement was running."""
        if not self._turn.locked():  # else the running statement reads them
            pgconn = self.connection.pgconn
            pgconn.consume_input()
            while (notification := pgconn.notifies()) is not None:
                if pgconn.notify_handler is not None:
                    pgconn.notify_handler(notification)

    def _on_readable(self) -> None:
        try:
            self._receive()
        except psycopg.Error:
            self._stop_listening()
            self._notification.set()  # ends the wait; the next one raises the error

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            os.close(self._listener)
            self._listener = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, *, at_once: bool = False) -> None:
        """Close the connection once the operation in progress has ended; if ``at_once``, it fails. Idempotent."""
        self._stop_listening()
        if at_once:
            self._thread.cut()
        async with self._turn:  # libpq frees buffers that a thread may be reading
            await self.connection.close()
        self._thread.close()


def refuse_other_server(guard: Row | None, expected: Server) -> None:
    """Raise if the result of a ``guard`` statement names another server. A pooler or proxy may hide a failover."""
    standby, timeline, system_identifier = guard[-3:] if guard is not None else (True, None, None)
    if standby or (int(timeline, 16), system_identifier) != expected.identity:
        raise DatabaseUnavailable(
            "another server answers now (a failover, or a restored copy): the session starts again"
        )


async def _identified(connection: PinnedConnection, pooler: str) -> Server:
    cursor = await connection.execute(statements("connection")["server"])
    pid, version, prepared, identifier, timeline = await cursor.fetchone() or (0, 0, 0, 0, None)
    if timeline is None:
        raise InRecovery(_USE_THE_PRIMARY)
    if version < 140000:
        raise ConfigError(f"Postgres {version // 10000} is too old: Mailboat needs 14 or newer.")
    pooled = pooler is Pooler.TRANSACTION or (pooler is Pooler.AUTO and pid != connection.info.backend_pid)
    return Server(identifier, int(timeline, 16), version, pooled, prepared > 0, pid)
