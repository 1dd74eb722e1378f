"""Servers that can lose their last commits, and events with their positions and transaction ids."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg import sql

from mailboat.store.schema.migrate import apply_migrations
from mailboat_devservers.postgres import PostgresServer, find_postgres
from support.ledger import Arrival, Written, payload
from support.racing_writers import ACCOUNTS
from support.wait import wait_until

KEYS = 12

NEVER_FLUSHED = {
    "wal_writer_delay": "10s",
    "wal_writer_flush_after": "1GB",
    "autovacuum": "off",
    "bgwriter_lru_maxpages": "0",
}
"""Only a synchronous commit flushes the WAL. A crash loses all later asynchronous commits."""


@dataclass(frozen=True, slots=True)
class Row:
    """An event with its position and transaction id."""

    event: Written
    id: int
    xid: int


def write(url: str, count: int, *, asynchronous: bool = False) -> list[Row]:
    """Commit events of a few keys, one transaction each. A crash may lose asynchronous commits."""
    rows = []
    with psycopg.connect(url, autocommit=True) as connection:
        if asynchronous:
            connection.execute("set synchronous_commit = off")
        for index in range(count):
            rows.append(_write(connection, f"account-{1 + index % KEYS}"))
    return rows


def _write(connection: psycopg.Connection[tuple[Any, ...]], key: str) -> Row:
    with connection.transaction():
        (number,) = _one(connection, "update accounts set number = number + 1 where key = %s returning number", key)
        content = payload(key, number)
        event_id, id_, xid = _one(
            connection,
            "insert into mailboat.outbox (event_type, key, payload) values ('tail.lost', %s, %s)"
            " returning event_id::text, id, xid::text::bigint",
            key,
            content,
        )
    return Row(Written(event_id, key, number, content), id_, xid)


def _one(connection: psycopg.Connection[tuple[Any, ...]], statement: str, *values: object) -> tuple[Any, ...]:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return row


def hold_the_log_writer(server: PostgresServer) -> None:
    """Suspend the WAL writer, which flushes every ten seconds. Call this after every start of the server."""

    def found() -> list[psutil.Process]:
        children = psutil.Process(server.pid).children()
        return [child for child in children if "walwriter" in _title(child)]

    for process in wait_until(found, 60, "the log writer"):
        process.suspend()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # an ended session
        return ""


def start_primary(major: int, directory: Path) -> PostgresServer:
    """Start a server with an outbox in its database ``postgres``. The server stops with the test run at the latest."""
    server = PostgresServer.start(find_postgres(major), directory, settings=NEVER_FLUSHED)
    asyncio.run(_migrate(server.url()))
    with psycopg.connect(server.url()) as connection:
        connection.execute(ACCOUNTS.format(keys=KEYS))
    return server


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await apply_migrations(connection, "mailboat.outbox")


def assert_reused(lost: Collection[Row], later: Collection[Row]) -> None:
    """Check that the server reused positions and transaction ids of lost events."""
    assert lost, "no commit was lost"
    ids, xids = {row.id for row in lost}, {row.xid for row in lost}
    assert ids & {row.id for row in later}, f"no position was given out again: {sorted(ids)[:3]}…"
    assert xids & {row.xid for row in later}, f"no transaction id was given out again: {sorted(xids)[:3]}…"


def of(events: Collection[str], arrivals: Collection[Arrival]) -> list[Arrival]:
    return [arrival for arrival in arrivals if arrival.event_id in events]


def cut_off(primary: PostgresServer, standby: PostgresServer) -> None:
    """Disconnect the standby from the primary after it has caught up.

    A standby with paused replay would still replay the received WAL before its promotion.
    """
    (end,) = primary.execute("select pg_current_wal_insert_lsn()::text")[0]
    primary.execute("select pg_switch_wal()")
    replayed = sql.SQL("select pg_last_wal_replay_lsn() >= {}::pg_lsn").format(sql.Literal(end))
    wait_until(lambda: standby.execute(replayed) == [(True,)], 60, "the standby to catch up")
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    wait_until(lambda: not standby.execute("select 1 from pg_stat_wal_receiver"), 60, "the standby to be cut off")
