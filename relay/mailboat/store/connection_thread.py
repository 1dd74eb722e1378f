"""Blocking work on a connection, in a dedicated thread, with cancellation.

psycopg's blocking calls cost less than half of its awaitable ones, because a thread that waits inside libpq does not
use the event loop. Frequent work runs this way: ticks and reads of large windows.

A thread can't be cancelled, but its socket can be shut down. This happens past the deadline, and if the session ends
during an operation. While the thread is still connecting, there is no socket to shut down. Then ``given_up`` is set,
and the thread ends as soon as it is connected.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg.pq.abc import PGconn

from mailboat.errors import DatabaseUnavailable, MailboatError

T = TypeVar("T")


class BlockingWork:
    """Runner of one operation at a time. The caller must not start a second one."""

    def __init__(self, name: str, deadline: float, connection: Callable[[], PGconn | None]) -> None:
        """``connection`` returns the connection to shut down, or None if there is none yet."""
        self._name = name
        self._deadline = deadline
        self._connection = connection
        self._thread: ThreadPoolExecutor | None = None
        self._at_work: Future[Any] | None = None
        self._latest = self._begun = threading.Event()
        """Cancellation flags of the run that was requested last, and of the run that the thread is executing."""

    @property
    def given_up(self) -> bool:
        """True if the current run was cancelled. The thread checks this once its connection is visible to `cut`."""
        return self._begun.is_set()

    async def run(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """Run ``work``, which must only raise Mailboat errors, and return its result.

        Raises ``DatabaseUnavailable`` past the deadline, unless ``patient``.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"mailboat-{self._name}")
        given_up = self._latest = threading.Event()

        def begin() -> T:
            self._begun = given_up
            return work()

        at_work = self._thread.submit(begin)
        self._at_work = at_work
        done = asyncio.wrap_future(at_work)
        try:
            async with asyncio.timeout(None if patient else self._deadline):
                return await asyncio.shield(done)
        except (TimeoutError, asyncio.CancelledError) as error:
            self.cut()
            with suppress(MailboatError):
                await done
            if isinstance(error, TimeoutError):
                raise DatabaseUnavailable(f"Postgres did not answer within {self._deadline:.0f} s") from error
            raise

    def close(self) -> None:
        """Shut the thread down. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            # The socket of a busy thread was shut down, so the thread ends. Waiting for it would block the event loop.
            thread.shutdown(wait=self._at_work is None or self._at_work.done())

    def cut(self) -> None:
        """Cancel the running operation, if any. It fails as if the server had become unavailable."""
        self._latest.set()
        pgconn = self._connection()
        if pgconn is not None and pgconn.status != psycopg.pq.ConnStatus.BAD:
            with suppress(OSError), socket.socket(fileno=pgconn.socket) as peer:
                try:
                    peer.shutdown(socket.SHUT_RDWR)
                finally:
                    peer.detach()  # libpq keeps the descriptor
