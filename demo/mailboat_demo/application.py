"""The application: a shop that changes orders on several connections and emits an event with every change.

Business rows and events are written in the same transaction. An application has nothing else to do. This one misbehaves
on purpose: some transactions roll back after the emit, some are slow, and one stays open for the whole run.
"""

from __future__ import annotations

import threading
from random import Random
from typing import Final

import psycopg

from mailboat_demo import orders
from mailboat_demo.orders import ChangedMind
from mailboat_demo.verification import Written

_ORDERS: Final = 60
_CHANGES_ITS_MIND: Final = 0.1
_DAWDLES: Final = 0.05
_DAWDLING: Final = 0.03
_LARGE: Final = 60_000
SLOW_ORDER: Final = "order-slow"
LARGE_ORDER: Final = "order-large"
LARGE_TYPE: Final = "order.exported"


class Shop:
    """The application, with counters of its commits and rollbacks."""

    def __init__(self, url: str, *, writers: int, per_second: float, seed: int) -> None:
        self.committed = 0
        self.rolled_back = 0
        self.failure: Exception | None = None
        self._url = url
        self._pause = writers / per_second
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._trade, args=(Random(seed + number),), name=f"demo-writer-{number}")
            for number in range(writers)
        ]
        self._slow: psycopg.Connection | None = None

    def open(self) -> None:
        """Create the business tables, begin the slow transaction, start the writers."""
        orders.lay_out(self._url, [*(f"order-{number}" for number in range(_ORDERS)), SLOW_ORDER, LARGE_ORDER])
        self._slow = psycopg.connect(self._url)
        orders.change(self._slow, SLOW_ORDER)
        for thread in self._threads:
            thread.start()

    def change(self, order: str, *, type: str = "order.changed", filler: int = 0) -> None:
        """Commit one change."""
        with psycopg.connect(self._url) as connection:
            orders.change(connection, order, type=type, filler=filler)
        self._count()

    def export(self) -> None:
        """Emit an event that is larger than the destination accepts."""
        self.change(LARGE_ORDER, type=LARGE_TYPE, filler=_LARGE)

    def stop(self) -> None:
        """Stop the writers and commit the long-running transaction."""
        self.close()
        if self._slow is not None:
            self._slow.commit()
            self._slow.close()
            self._slow = None
            self._count()

    def close(self) -> None:
        """Stop the writers. Safe to call twice."""
        self._closed.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def book(self) -> dict[str, Written]:
        """Return the committed changes by event id, from the application's own table."""
        return orders.book(self._url)

    def _trade(self, random: Random) -> None:
        try:
            with psycopg.connect(self._url) as connection:
                while not self._closed.wait(random.uniform(0.5, 1.5) * self._pause):
                    self._change_some_order(connection, random)
        except Exception as error:
            self.failure = error  # raised by the scenario on the main thread

    def _change_some_order(self, connection: psycopg.Connection, random: Random) -> None:
        try:
            with connection.transaction():
                orders.change(connection, f"order-{random.randrange(_ORDERS)}")
                if random.random() < _DAWDLES:
                    self._closed.wait(_DAWDLING)
                if random.random() < _CHANGES_ITS_MIND:
                    raise ChangedMind
        except ChangedMind:
            with self._counting:
                self.rolled_back += 1
        else:
            self._count()

    def _count(self) -> None:
        with self._counting:
            self.committed += 1
