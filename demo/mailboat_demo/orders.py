"""The business tables of a shop, and its transaction: change an order, emit an event, write a record.

The record is written to the application's database by the same transaction, so it is exact even if the response to a
commit was lost. Used by the demo and by the end-to-end tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Final

import psycopg

import mailboat
from mailboat_demo.verification import Written

_SCHEMA: Final = """
create schema if not exists shop;
create table if not exists shop.orders (id text primary key, version integer not null default 0);
create table if not exists shop.changes (
    event_id uuid primary key, order_id text not null references shop.orders, version integer not null
);
"""


class ChangedMind(Exception):
    """Raised to roll back after the event was emitted."""


def lay_out(url: str, orders: Iterable[str]) -> None:
    """Create the tables with these orders. Safe to run twice."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_SCHEMA)
        connection.cursor().executemany(
            "insert into shop.orders (id) values (%s) on conflict do nothing", [(order,) for order in orders]
        )


def change(connection: psycopg.Connection, order: str, *, type: str = "order.changed", filler: int = 0) -> None:
    """Run the business transaction up to its commit. The update locks the order, which keeps its events in order."""
    row = connection.execute(
        "update shop.orders set version = version + 1 where id = %s returning version", (order,)
    ).fetchone()
    assert row is not None, f"{order} was laid out"
    payload = {"order": order, "version": row[0], "filler": "x" * filler}
    event_id = mailboat.emit(connection, type, payload, aggregate_type="order", aggregate_id=order)
    connection.execute("insert into shop.changes values (%s, %s, %s)", (event_id, order, row[0]))


def book(url: str) -> dict[str, Written]:
    """Return the committed changes by event id."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("select event_id::text, order_id, version from shop.changes").fetchall()
    return {event_id: Written(order, version) for event_id, order, version in rows}


def await_outbox(url: str, timeout: float) -> None:
    """Wait until a relay has migrated the database. Raise ``TimeoutError`` if none does."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with psycopg.connect(url) as connection:
            (ready,) = connection.execute("select to_regclass('mailboat.outbox') is not null").fetchone() or (False,)
        if ready:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no outbox after {timeout:.0f} s")


def keep_changing(url: str, names: Sequence[str], stop: threading.Event, every: float) -> None:
    """Change one order every ``every`` seconds, in turn, until ``stop`` is set or the database is unavailable."""
    with psycopg.connect(url) as connection:
        for name in cycle(names):
            if stop.wait(every):
                return
            try:
                with connection.transaction():
                    change(connection, name)
            except psycopg.OperationalError:
                return
