"""Trades: every order that changes is written with its event, in one transaction, on several connections at once.

The database may go away at any moment. A commit whose answer was lost needs no thought: the book of what was committed
lies in the same database and was written by the same transaction (``mailboat_demo.orders``). Whatever else goes wrong,
or takes long, is something that Mailboat must not do to a shop (G10): it is written down.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from random import Random

import psycopg

from mailboat_demo.orders import ChangedMind, change

APPLICATION = "shop"
"""How Postgres knows the writers."""
_CHANGES_ITS_MIND = 0.1
_PAUSE_AFTER_FAILURE = 0.2
_GOODBYES = ("57P01", "57P02", "57P03")
"""The server ends, or has not come up yet."""


class OwnQueue(Exception):
    """An order that another writer has, for long."""


@dataclass(slots=True)
class Report:
    """A day at the shop."""

    committed: int = 0
    slowest: float = 0.0
    """Seconds that the slowest change took, from its beginning to its commit."""
    complaints: list[str] = field(default_factory=list)
    """What failed, though the database was there."""


class Trade:
    """Writers that change random orders until ``count`` changes are committed, or until they are stopped."""

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
                # An application may be there before the relay beside it has made the outbox.
                early = not self.report.committed and isinstance(error, psycopg.errors.UndefinedTable)
                if not (early or _is_away(error) or isinstance(error, OwnQueue)):
                    with self._lock:
                        self.report.complaints.append(f"{type(error).__name__}: {error}")
                    return
                self._stopped.wait(_PAUSE_AFTER_FAILURE)

    def _connect(self) -> psycopg.Connection:
        # A lock that somebody holds for longer is a complaint, not only a slow change.
        return psycopg.connect(self._url, connect_timeout=5, application_name=APPLICATION, options="-c lock_timeout=5s")

    def _one_more(self) -> bool:
        return not self._stopped.is_set() and (self._count is None or self.report.committed < self._count)

    def _change_some_order(self, connection: psycopg.Connection, random: Random) -> None:
        began = time.monotonic()
        try:
            with connection.transaction():
                order = f"order-{random.randrange(self._orders)}"
                _take(connection, order)
                change(connection, order)
                if random.random() < _CHANGES_ITS_MIND:
                    raise ChangedMind
        except ChangedMind:
            return
        with self._lock:
            self.report.committed += 1
            self.report.slowest = max(self.report.slowest, time.monotonic() - began)


def _is_away(error: Exception) -> bool:
    """Postgres is away, or says goodbye: that is what stories are about. A lock that did not come is not."""
    state = error.sqlstate if isinstance(error, psycopg.OperationalError) else "none of these"
    return state is None or state.startswith("08") or state in _GOODBYES


def _take(connection: psycopg.Connection, order: str) -> None:
    """Only writers touch these rows: a wait for one is a wait for another writer. Whoever kept that one complains."""
    try:
        connection.execute("select from shop.orders where id = %s for update", (order,))
    except psycopg.errors.LockNotAvailable as error:
        raise OwnQueue from error
