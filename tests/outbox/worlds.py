"""The worlds that the conformance suite runs in: an outbox that writers write to and relays read from.

One is in memory, the others are real servers. The suite sees only what is here, so that what it says holds for all.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from mailboat.errors import LeaseLost
from mailboat.outbox.declaring import Declared
from mailboat.outbox.leases import RelayIdentity
from mailboat.outbox.memory import MemoryOutbox, MemoryStore, Transaction
from mailboat.outbox.postgres import PostgresStore, StoreSettings
from mailboat.outbox.store import OutboxStore, Subscription
from mailboat_harbor.postgres import Database
from mailboat_spec import EventSubscription
from waiting import await_until

SETTINGS = StoreSettings(lease_ttl=60.0, overdue_after=0.0)


class Writer(Protocol):
    """An application's transaction."""

    def insert(self, type: str, *, key: str | None = None, payload: bytes | None = b"{}", **columns: Any) -> str:
        """Adds an event and returns its id."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class Store(OutboxStore, Protocol):
    """A store, with what a session's beginning needs."""

    async def declare(
        self, subscriptions: Sequence[Declared], *, may_lay_out: bool = True
    ) -> dict[int, Subscription]: ...

    async def join(self) -> None: ...


class World(Protocol):
    """An outbox."""

    def begin(self, *, early: bool = False) -> Writer:
        """``early``: the transaction takes its number before it writes anything."""
        ...

    async def open(self, relay: str, settings: StoreSettings = SETTINGS) -> Store:
        """A relay's store, connected; not declared, not joined."""
        ...

    def pause(self, number: int, paused: bool) -> None: ...

    def replay_all(self, number: int) -> None: ...

    def reset(self) -> None:
        """An empty outbox again."""
        ...

    async def close(self) -> None:
        """Closes all stores and writers."""
        ...

    def dismiss_writers(self) -> None: ...


class MemoryWorld:
    """All of it in memory."""

    def __init__(self) -> None:
        self.outbox = MemoryOutbox()

    def begin(self, *, early: bool = False) -> Writer:
        return _MemoryWriter(self.outbox.begin(early=early))

    async def open(self, relay: str, settings: StoreSettings = SETTINGS) -> Store:
        return MemoryStore(self.outbox, RelayIdentity(relay, str(uuid.uuid4())), settings)

    def pause(self, number: int, paused: bool) -> None:
        self.outbox.pause(number, paused)

    def replay_all(self, number: int) -> None:
        self.outbox.replay([dead for dead in self.outbox.dead if dead.cursor.subscription == number])

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
        return self._transaction.insert(type, key=key, payload=payload, **columns).event_id


class PostgresWorld:
    """A database of a real server."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._idle: list[psycopg.Connection[Any]] = []
        self._stores: list[PostgresStore] = []

    def begin(self, *, early: bool = False) -> Writer:
        # Writers do not wait for the disk: what they write is visible at once, and no test here crashes the server.
        options = "-c synchronous_commit=off"
        connection = self._idle.pop() if self._idle else psycopg.connect(self.database.url, options=options)
        connection.execute("select pg_current_xact_id()" if early else "select 1")
        return _PostgresWriter(connection, self._idle)

    async def open(self, relay: str, settings: StoreSettings = SETTINGS) -> Store:
        store = await PostgresStore.open(lambda: self.database.url, RelayIdentity(relay, str(uuid.uuid4())), settings)
        self._stores.append(store)
        return store

    def pause(self, number: int, paused: bool) -> None:
        with psycopg.connect(self.database.url) as connection:
            state = "Paused" if paused else "Running"
            connection.execute("update mailboat.subscriptions set state = %s where id = %s", [state, number])

    def replay_all(self, number: int) -> None:
        with psycopg.connect(self.database.url) as connection:
            connection.execute(
                """
                with dead as (delete from mailboat.dead_letters where subscription_id = %s returning *)
                insert into mailboat.parked (
                    subscription_id, partition, rank, replay, next_attempt_at, sequence, id, event_id, event_type,
                    aggregate_type, aggregate_id, key, payload, content_type, headers, tags, created_at, slot)
                select subscription_id, partition, 0, true, clock_timestamp(), sequence, id, event_id, event_type,
                       aggregate_type, aggregate_id, key, payload, content_type, headers, tags, created_at, slot
                from dead
                """,
                [number],
            )

    def transactions_begun(self) -> str:
        """A number that only a transaction which writes something moves."""
        return str(self.database.execute("select pg_snapshot_xmax(pg_current_snapshot())::text")[0][0])

    def reset(self) -> None:
        with psycopg.connect(self.database.url, autocommit=True) as connection:
            for table in ("outbox", "subscriptions", "relays", "doorbells"):  # TRUNCATE takes longer with 32 partitions
                connection.execute(sql.SQL("delete from mailboat.{}").format(sql.Identifier(table)))

    async def close(self) -> None:
        for store in self._stores:
            await store.close(leave=False)
        self._stores.clear()
        self.dismiss_writers()

    def dismiss_writers(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _PostgresWriter:
    def __init__(self, connection: psycopg.Connection[Any], idle: list[psycopg.Connection[Any]]) -> None:
        self._connection = connection
        self._idle = idle

    def insert(self, type: str, *, key: str | None = None, payload: bytes | None = b"{}", **columns: Any) -> str:
        row: dict[str, Any] = {"aggregate_type": None, "aggregate_id": None, "headers": None, "tags": []} | columns
        headers = Jsonb(row["headers"]) if isinstance(row["headers"], Mapping) else row["headers"]
        cursor = self._connection.execute(
            "insert into mailboat.outbox (event_type, key, payload, aggregate_type, aggregate_id, headers, tags)"
            " values (%s, %s, %s, %s, %s, %s, %s) returning event_id::text",
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
    """Joins under a name whose last process has just died: a server needs a moment to notice."""

    async def join() -> bool:
        try:
            await store.join()
        except LeaseLost:
            return False
        return True

    await eventually(join, what="the end of the last relay's session")


async def eventually(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Waits until the condition, a coroutine function, answers with something true."""
    asked: Callable[[], object | Awaitable[object]] = condition
    await await_until(asked, what=what)


def subscription(name: str = "all", *, partitions: int = 2, **spec: Any) -> Declared:
    """A subscription of the outbox; ``spec`` as in a manifest."""
    resource = EventSubscription.model_validate(
        {
            "apiVersion": "mailboat.dev/v1alpha1",
            "kind": "EventSubscription",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"relayRef": {"name": "orders"}, "partitions": partitions, "sink": {"log": {}}, **spec},
        }
    )
    return Declared.of(resource)
