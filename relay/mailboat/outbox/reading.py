"""Reading open windows, in a thread of its own.

Two megabytes of rows arrive in hundreds of small reads of a socket. An event loop would wake up for each of them; a
thread that waits inside libpq does not, and reads the next stretch while the loop encodes and publishes the last one.

The thread can't be cancelled, but its socket can be cut: that is what happens when the database is deaf for too long or
when the session ends in the middle of a read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import psycopg
from psycopg import Connection, Cursor, IsolationLevel

from mailboat.errors import DatabaseUnavailable
from mailboat.outbox.composed import Compositions, asking, lease_arrays
from mailboat.outbox.link import (
    SESSION_PATIENCE,
    Row,
    Server,
    UrlProvider,
    explain,
    libpq_settings,
    patience,
    refuse_other_server,
)
from mailboat.outbox.sqlfiles import statements
from mailboat.outbox.store import Chunk, CursorKey, Lease, Window
from mailboat.outbox.windows import ReadLimits

_SQL = statements("windows")

T = TypeVar("T")


class ReadingThread:
    """A connection that reads, one request at a time."""

    def __init__(self, url: UrlProvider, server: Server, deadline: float) -> None:
        self._url = url
        self._server = server
        self._deadline = deadline
        self._connection: Connection[Row] | None = None
        self._turn = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None

    async def transaction(self, work: Callable[[Cursor[Row]], T]) -> T:
        """Runs ``work`` with a cursor (binary results) in a transaction, in the thread."""
        async with self._turn:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="mailboat-reader")
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)
            try:
                async with asyncio.timeout(self._deadline):
                    return await asyncio.shield(done)
            except (TimeoutError, asyncio.CancelledError) as error:
                self._cut()
                with suppress(DatabaseUnavailable):
                    await done
                if isinstance(error, TimeoutError):
                    raise DatabaseUnavailable(f"Postgres did not answer within {self._deadline:.0f} s") from error
                raise

    async def close(self) -> None:
        """Lets go of thread and connection. Safe to call twice."""
        async with self._turn:
            thread, self._thread = self._thread, None
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if thread is not None:
            thread.shutdown()

    def _run(self, work: Callable[[Cursor[Row]], T]) -> T:
        try:
            if self._connection is None:
                url = self._url()
                self._connection = psycopg.connect(
                    url,
                    autocommit=True,
                    application_name="mailboat reader",
                    prepare_threshold=None if self._server.pooled else 5,
                    **libpq_settings(url),
                )
                if not self._server.pooled:
                    self._connection.execute(SESSION_PATIENCE, patience(self._deadline))
                self._connection.isolation_level = IsolationLevel.REPEATABLE_READ
            with self._connection.transaction(), self._connection.cursor(binary=True) as cursor:
                refuse_other_server(cursor.execute(_SQL["guard"]).fetchone(), self._server)
                return work(cursor)
        except psycopg.Error as error:
            raise explain(error) from error

    def _cut(self) -> None:
        if self._connection is not None and not self._connection.closed:
            with suppress(OSError), socket.socket(fileno=self._connection.fileno()) as peer:
                try:
                    peer.shutdown(socket.SHUT_RDWR)
                finally:
                    peer.detach()  # the descriptor stays libpq's


class WindowReads:
    """The next stretch of an open window, for all members that share it."""

    def __init__(self, thread: ReadingThread, compositions: Compositions, limits: ReadLimits) -> None:
        self._thread = thread
        self._compositions = compositions
        self._limits = limits

    async def read(self, window: Window, members: Sequence[Lease], after: int) -> Chunk:
        """Where all leases were lost it reads as the end of the window; settling will say so."""
        return await self._thread.transaction(lambda cursor: self._read(cursor, window, members, after))

    def _read(self, cursor: Cursor[Row], window: Window, members: Sequence[Lease], after: int) -> Chunk:
        composed = self._compositions.for_members(members)
        keys = frozenset(lease.key for lease in members)
        cursor.execute(_SQL["standing"], {**lease_arrays(members), "upto": window.upto})
        standing = {CursorKey(*row) for row in cursor.fetchall()}
        reader = next((lease for lease in members if lease.key in standing), None)
        if reader is None:
            return Chunk({}, after, last=True)
        where = {**asking(reader), "upto": window.upto, "after": after}
        if window.highest is None:
            rows = cursor.execute(composed.small_window, where).fetchall()
            return Chunk(composed.fan_out(rows, keys), rows[-1][0] if rows else after, last=True)
        walk_from = (window.lowest or 1) - 1
        if after < walk_from:
            rows = cursor.execute(composed.late, where).fetchall()
            return Chunk(composed.fan_out(rows, keys), walk_from, last=False)
        reach, last = self._reach(cursor, where)
        if reach is None:
            return Chunk({}, after, last=True)
        statement = composed.indebted_window if window.indebted else composed.large_window
        rows = cursor.execute(statement, {**where, "reach": reach}).fetchall()
        return Chunk(composed.fan_out(rows, keys), reach, last)

    def _reach(self, cursor: Cursor[Row], where: dict[str, object]) -> tuple[int | None, bool]:
        """Up to which id to read, and whether the window ends there."""
        where = {**where, "limit": self._limits.rows, "max_bytes": self._limits.bytes}
        reach, looked_at, size = cursor.execute(self._compositions.reach, where).fetchone() or (None, 0, 0)
        if size <= self._limits.bytes:
            return reach, looked_at < self._limits.rows
        (within,) = cursor.execute(self._compositions.reach_within, where).fetchone() or (reach,)
        return within, within == reach and looked_at < self._limits.rows
