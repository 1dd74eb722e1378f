"""The load of the stories: writers on several connections change orders, each with its event in one transaction.

The database may go down at any moment. A lost acknowledgement of a commit does no harm: the same transaction records
the change in the same database (``mailboat_demo.orders``). Every other error, and the duration of the slowest change,
is reported, since Mailboat must not harm the writers (G10).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from random import Random

import psycopg

from mailboat_demo.orders import ChangedMind, change

APPLICATION = "shop"
"""Application name of the writers in Postgres."""
_ROLLBACK_RATE = 0.1
_PAUSE_AFTER_FAILURE = 0.2
_SHUTDOWN_STATES = ("57P01", "57P02", "57P03")
"""SQLSTATEs of a server that stops or starts."""


class WriterConflict(Exception):
    """Another writer holds the lock of the order."""


@dataclass(slots=True)
class Report:
    """Result of the writers."""

    committed: int = 0
    slowest: float = 0.0
    """Seconds of the slowest change, from its beginning to its commit."""
    errors: list[str] = field(default_factory=list)
    """Failed changes while the database was up."""


class Trade:
    """Writers that change random orders until ``count`` changes are committed or ``stop`` is called."""

    def __init__(self, url: str, *, orders: int, writers: int, per_second: float, count: int | None) -> None:
        self.report = Report()
        self._url = url
        self._orders = orders
        self._pause = writers / per_second if per_second else 0.0
        self._count = count
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._trade, args=(Random(number),), name=f"writer-{number}")
            for number in range(writers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _trade(self, random: Random) -> None:
        while not self._stopped.is_set():
            try:
                with self._connect() as connection:
                    while self._one_more():
                        self._change_some_order(connection, random)
                        self._stopped.wait(random.uniform(0.5, 1.5) * self._pause)
                    return
            except Exception as error:
                # An application may start before its sidecar has created the outbox.
                early = not self.report.committed and isinstance(error, psycopg.errors.UndefinedTable)
                if not (early or _is_unavailable(error) or isinstance(error, WriterConflict)):
                    with self._lock:
                        self.report.errors.append(f"{type(error).__name__}: {error}")
                    return
                self._stopped.wait(_PAUSE_AFTER_FAILURE)

    def _connect(self) -> psycopg.Connection:
        # A longer wait for a lock is an error, not only a slow change.
        return psycopg.connect(self._url, connect_timeout=5, application_name=APPLICATION, options="-c lock_timeout=5s")

    def _one_more(self) -> bool:
        return not self._stopped.is_set() and (self._count is None or self.report.committed < self._count)

    def _change_some_order(self, connection: psycopg.Connection, random: Random) -> None:
        began = time.monotonic()
        try:
            with connection.transaction():
                order = f"order-{random.randrange(self._orders)}"
                _lock_order(connection, order)
                change(connection, order)
                if random.random() < _ROLLBACK_RATE:
                    raise ChangedMind
        except ChangedMind:
            return
        with self._lock:
            self.report.committed += 1
            self.report.slowest = max(self.report.slowest, time.monotonic() - began)


def _is_unavailable(error: Exception) -> bool:
    """Whether Postgres is down, stops or starts, as stories intend. A lock time-out is not among these."""
    state = error.sqlstate if isinstance(error, psycopg.OperationalError) else "none of these"
    return state is None or state.startswith("08") or state in _SHUTDOWN_STATES


def _lock_order(connection: psycopg.Connection, order: str) -> None:
    """Lock the row of an order. Only writers lock these rows, so a time-out is the effect of a delay elsewhere."""
    try:
        connection.execute("select from shop.orders where id = %s for update", (order,))
    except psycopg.errors.LockNotAvailable as error:
        raise WriterConflict from error
