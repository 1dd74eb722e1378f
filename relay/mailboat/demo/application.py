"""The application: a shop that changes orders on several connections, and emits an event with every change.

Business rows and events are written in the same transaction, which is all that an application has to do. It behaves
badly on purpose: it changes its mind (rolls back after it has emitted), dawdles inside transactions, and keeps one
transaction open all along.
"""

from __future__ import annotations

import threading
from random import Random
from typing import Final

import psycopg

import mailboat
from mailboat.demo.proof import Written

_SCHEMA: Final = """
create schema shop;
create table shop.orders (id text primary key, version integer not null default 0);
create table shop.changes (
    event_id uuid primary key, order_id text not null references shop.orders, version integer not null
);
"""
_ORDERS: Final = 60
_CHANGES_ITS_MIND: Final = 0.1
_DAWDLES: Final = 0.05
_DAWDLING: Final = 0.03
_LARGE: Final = 60_000
SLOW_ORDER: Final = "order-slow"
LARGE_ORDER: Final = "order-large"
LARGE_TYPE: Final = "order.exported"


class ChangedMind(Exception):
    """The application rolls back."""


class Shop:
    """The application and its own book of what it committed."""

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
        """Lay out the business tables, begin the slow transaction, start to trade."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(_SCHEMA)
            names = [*(f"order-{number}" for number in range(_ORDERS)), SLOW_ORDER, LARGE_ORDER]
            connection.cursor().executemany("insert into shop.orders (id) values (%s)", [(name,) for name in names])
        self._slow = psycopg.connect(self._url)
        _change(self._slow, SLOW_ORDER)
        for thread in self._threads:
            thread.start()

    def change(self, order: str, *, type: str = "order.changed", filler: int = 0) -> None:
        """One change, committed."""
        with psycopg.connect(self._url) as connection:
            _change(connection, order, type, filler)
        self._count()

    def export(self) -> None:
        """An event that is larger than the destination takes."""
        self.change(LARGE_ORDER, type=LARGE_TYPE, filler=_LARGE)

    def stop(self) -> None:
        """Stop trading; commit, at last, the transaction that was open all along."""
        self.close()
        if self._slow is not None:
            self._slow.commit()
            self._slow.close()
            self._slow = None
            self._count()

    def close(self) -> None:
        """Stop trading. Safe to call twice."""
        self._closed.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def book(self) -> dict[str, Written]:
        """What is committed, by event id, from the application's own table."""
        with psycopg.connect(self._url) as connection:
            rows = connection.execute("select event_id::text, order_id, version from shop.changes").fetchall()
        return {event_id: Written(order, version) for event_id, order, version in rows}

    def _trade(self, random: Random) -> None:
        try:
            with psycopg.connect(self._url) as connection:
                while not self._closed.wait(random.uniform(0.5, 1.5) * self._pause):
                    self._change_some_order(connection, random)
        except Exception as error:
            self.failure = error  # told by the story, on the main thread

    def _change_some_order(self, connection: psycopg.Connection, random: Random) -> None:
        try:
            with connection.transaction():
                _change(connection, f"order-{random.randrange(_ORDERS)}")
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


def _change(connection: psycopg.Connection, order: str, type: str = "order.changed", filler: int = 0) -> None:
    """The business transaction: lock the order, change it, emit, keep a record."""
    row = connection.execute(
        "update shop.orders set version = version + 1 where id = %s returning version", (order,)
    ).fetchone()
    assert row is not None, f"order {order} is there from the beginning"
    payload = {"order": order, "version": row[0], "export": "x" * filler}
    event_id = mailboat.emit(connection, type, payload, aggregate_type="order", aggregate_id=order)
    connection.execute("insert into shop.changes values (%s, %s, %s)", (event_id, order, row[0]))
