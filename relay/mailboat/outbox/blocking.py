"""Blocking work with a connection, in a thread of its own, that can still be given up.

psycopg's blocking calls cost less than half of what its awaitable ones do: a thread that waits inside libpq touches no
event loop. What is done often goes this way, the ticks and the reading of large windows.

A thread can't be cancelled, but its socket can be cut: that is what happens when the database is deaf for too long or
when the session ends in the middle of something. While the thread still connects there is no socket to cut: it is told
so (``given_up``), and ends as soon as it is connected.
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
    """Runs one thing at a time; the caller sees to that."""

    def __init__(self, name: str, deadline: float, connection: Callable[[], PGconn | None]) -> None:
        """``connection`` is what is cut; None while there is none."""
        self._name = name
        self._deadline = deadline
        self._connection = connection
        self._thread: ThreadPoolExecutor | None = None
        self._at_work: Future[Any] | None = None
        self._latest = self._begun = threading.Event()
        """Set once the work is given up: of the run that was asked for last, and of the one that the thread is at."""

    @property
    def given_up(self) -> bool:
        """Nobody waits for this answer any more. For the thread, once others can see its connection."""
        return self._begun.is_set()

    async def run(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """The answer of ``work``, which raises errors of ours only.

        ``DatabaseUnavailable`` past the deadline, unless ``patient``.
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
        """Lets go of the thread. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            # A thread at work was cut, and ends by itself; waiting for it here would stop everybody else.
            thread.shutdown(wait=self._at_work is None or self._at_work.done())

    def cut(self) -> None:
        """Ends what runs, if anything does: it fails like one whose server went away."""
        self._latest.set()
        pgconn = self._connection()
        if pgconn is not None and pgconn.status != psycopg.pq.ConnStatus.BAD:
            with suppress(OSError), socket.socket(fileno=pgconn.socket) as peer:
                try:
                    peer.shutdown(socket.SHUT_RDWR)
                finally:
                    peer.detach()  # the descriptor stays libpq's
