"""Backends of the conformance suite for stores: an outbox with writers and relays.

One is in memory, the others are real servers. The suite uses only this interface, so that it runs on all backends.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from mailboat.errors import LeaseLost
from mailboat.store.admin.dead_letters import candidates, plan, replay
from mailboat.store.admin.selection import Match
from mailboat.store.outbox_store import OutboxStore, Subscription
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import RelayIdentity, StoreSettings
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import EventSubscription
from support.databases import connected
from support.manifests import declared
from support.memory_outbox import MemoryOutbox, MemoryStore, Transaction
from support.wait import await_until

SETTINGS = StoreSettings(lease_ttl=60.0, overdue_after=0.0)

subscription = partial(declared, partitions=2)


class Writer(Protocol):
    """Transaction of an application."""

    def insert(self, type: str, *, key: str | None = None, payload: bytes | None = b"{}", **columns: Any) -> str:
        """Add an event and return its id."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class Store(OutboxStore, Protocol):
    """Store with the methods that start a session."""

    async def declare(
        self, subscriptions: Sequence[EventSubscription], *, may_lay_out: bool = True
    ) -> dict[int, Subscription]: ...

    async def join(self) -> None: ...


class World(Protocol):
    """Outbox of a test."""

    def begin(self, *, early: bool = False) -> Writer:
        """Begin a transaction. With ``early``, it takes its id before its first write."""
        ...

    async def open(self, relay: str, settings: StoreSettings = SETTINGS) -> Store:
        """Return the store of a relay, connected, before ``declare`` and ``join``."""
        ...

    def pause(self, number: int, paused: bool) -> None: ...

    def set_clock(self, forward: timedelta) -> None:
        """Set the clock of the server forward: earlier heartbeats become older by that time."""
        ...

    async def replay_all(self) -> None:
        """Replay all dead letters, as by the CLI."""
        ...

    def reset(self) -> None:
        """Empty the outbox."""
        ...

    async def close(self) -> None:
        """Close all stores and writers."""
        ...

    def dismiss_writers(self) -> None: ...


class MemoryWorld:
    """Outbox in memory."""

    def __init__(self) -> None:
        self.outbox = MemoryOutbox()

    def begin(self, *, early: bool = False) -> Writer:
        return _MemoryWriter(self.outbox.begin(early=early))

    async def open(self, relay: str, settings: StoreSettings = SETTINGS) -> Store:
        return MemoryStore(self.outbox, RelayIdentity(relay, str(uuid.uuid4())), settings)

    def pause(self, number: int, paused: bool) -> None:
        self.outbox.pause(number, paused)

    def set_clock(self, forward: timedelta) -> None:
        for relay in self.outbox.relays.values():
            relay.beat_at -= forward

    async def replay_all(self) -> None:
        self.outbox.replay(list(self.outbox.dead))

    def reset(self) -> None:
        self.outbox = MemoryOutbox()

    async def close(self) -> None:
        pass

    def dismiss_writers(self) -> None:
        pass


class _MemoryWriter:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.commit = transaction.commit
        self.rollback = transaction.rollback

    def insert(self, type: str, *, key: str | None = None, payload: bytes | None = b"{}", **columns: Any) -> str:
        if isinstance(headers := columns.get("headers"), Mapping):
            columns["headers"] = json.dumps(headers)
        return self._transaction.insert(type, key=key, payload=payload, **columns).event_id


class PostgresWorld:
    """Database on a real server."""

    def __init__(
        self,
        database: Database,
        layout: TableLayout = TableLayout(),  # noqa: B008  # immutable
        url: str | None = None,
    ) -> None:
        """``url``: for the user of the relays, if it is not the owner."""
        self.database = database
        self._url = url or database.url
        self._layout = layout
        self._idle: list[psycopg.Connection[Any]] = []
        self._stores: list[PostgresStore] = []

    def begin(self, *, early: bool = False) -> Writer:
        # Commits need not reach the disk, since no test of the suite crashes the server.
        options = "-c synchronous_commit=off"
        connection = self._idle.pop() if self._idle else psycopg.connect(self.database.url, options=options)
        connection.execute("select pg_current_xact_id()" if early else "select 1")
        return _PostgresWriter(connection, self._idle, self._layout)

    async def open(self, relay: str, settings: StoreSettings = SETTINGS) -> Store:
        identity = RelayIdentity(relay, str(uuid.uuid4()))
        settings = replace(settings, layout=self._layout)
        store = await PostgresStore.open(lambda: self._url, identity, settings)
        self._stores.append(store)
        return store

    def pause(self, number: int, paused: bool) -> None:
        with psycopg.connect(self.database.url) as connection:
            state = "Paused" if paused else "Running"
            connection.execute("update mailboat.subscriptions set state = %s where id = %s", [state, number])

    def set_clock(self, forward: timedelta) -> None:
        with psycopg.connect(self.database.url, autocommit=True) as connection:
            statement = "update mailboat.relays set beat_at = beat_at - %(by)s, expires_at = expires_at - %(by)s"
            connection.execute(statement, {"by": forward})

    async def replay_all(self) -> None:
        async with connected(self.database.url, "replay") as link:
            outbox = str(self._layout.table)
            found = await candidates(link, Match(outbox), replayed=False, limit=None)
            await replay(link, outbox, plan(found).replay, again=False)

    def row_versions(self) -> list[tuple[Any, ...]]:
        """Return the versions of all rows of Mailboat's tables. A write changes xmin and ctid, a row lock changes xmax.

        Transaction ids would prove less, since other tests on the shared server consume them too.
        """
        tables = ("subscriptions", "cursors", "relays", "wakeup_requests", "parked", "dead_letters")
        query = sql.SQL(" union all ").join(
            sql.SQL("select {}, ctid::text, xmin::text, xmax::text from {}").format(
                name, sql.Identifier("mailboat", name)
            )
            for name in tables
        )
        return self.database.execute(query + sql.SQL(" order by 1, 2"))

    def reset(self) -> None:
        with psycopg.connect(self.database.url, autocommit=True) as connection:
            tables = [sql.Identifier("mailboat", name) for name in ("subscriptions", "relays", "wakeup_requests")]
            for table in (self._layout.outbox, *tables):  # TRUNCATE takes longer with 32 partitions
                connection.execute(sql.SQL("delete from {}").format(table))

    async def close(self) -> None:
        for store in self._stores:
            await store.close(leave=False)
        self._stores.clear()
        self.dismiss_writers()

    def dismiss_writers(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


_WRITTEN = ("event_type", "key", "payload", "aggregate_type", "aggregate_id", "headers", "tags")


class _PostgresWriter:
    def __init__(
        self, connection: psycopg.Connection[Any], idle: list[psycopg.Connection[Any]], layout: TableLayout
    ) -> None:
        self._connection = connection
        self._idle = idle
        names = [layout.columns.get(name, name) for name in (*_WRITTEN, "event_id")]
        *written, event_id = (sql.Identifier(name) for name in names)
        self._insert = sql.SQL("insert into {} ({}) values ({}) returning {}::text").format(
            layout.outbox, sql.SQL(", ").join(written), sql.SQL(", ").join([sql.Placeholder()] * len(written)), event_id
        )

    def insert(self, type: str, *, key: str | None = None, payload: bytes | None = b"{}", **columns: Any) -> str:
        row: dict[str, Any] = {"aggregate_type": None, "aggregate_id": None, "headers": None, "tags": []} | columns
        headers = Jsonb(row["headers"]) if isinstance(row["headers"], Mapping) else row["headers"]
        cursor = self._connection.execute(
            self._insert,
            [type, key, payload, row["aggregate_type"], row["aggregate_id"], headers, list(row["tags"])],
        )
        found = cursor.fetchone()
        assert found is not None
        return str(found[0])

    def commit(self) -> None:
        self._connection.commit()
        self._idle.append(self._connection)

    def rollback(self) -> None:
        self._connection.rollback()
        self._idle.append(self._connection)


async def joined(store: Store) -> None:
    """Join under the name of a crashed relay. Retry, since the server detects the lost session with a delay."""

    async def join() -> bool:
        try:
            await store.join()
        except LeaseLost:
            return False
        return True

    await eventually(join, what="the end of the last relay's session")


async def eventually(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait until the condition, a coroutine function, returns a true value."""
    asked: Callable[[], object | Awaitable[object]] = condition
    await await_until(asked, what=what)
