"""The thread of a connection, with cancellation.

psycopg's blocking calls cost less than half of its awaitable ones, because a thread that waits inside libpq does not
use the event loop. A thread can't be cancelled, but its socket can be shut down. This happens if the task that waits
for the thread is cancelled: past its deadline, or if the session ends during an operation.
"""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg.pq.abc import PGconn

from mailboat.errors import MailboatError

T = TypeVar("T")


class ConnectionThread:
    """Runner of one operation at a time. The caller must not start a second one."""

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
