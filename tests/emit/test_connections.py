"""Events are written through every supported kind of connection, in the application's transaction."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from mailboat import EmitRefused, NewEvent, emit, emit_many
from mailboat.emitter.drivers import AsyncHandle, SyncHandle
from mailboat_devservers.postgres import Database

Opener = Callable[[Database], AbstractContextManager[SyncHandle]]
AsyncOpener = Callable[[Database], AbstractAsyncContextManager[AsyncHandle]]


def emitted(database: Database) -> list[tuple[Any, ...]]:
    return database.execute(
        "select event_id, event_type, key, payload, content_type, headers, tags, traceparent"
        " from mailboat.outbox order by id"
    )


# ---- kinds of connections -----------------------------------------------------------------------------------------


@contextmanager
def psycopg_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.url) as connection, connection.cursor() as cursor:
        yield cursor


@contextmanager
def psycopg_transaction_in_autocommit(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.url, autocommit=True) as connection, connection.transaction():
        yield connection


@contextmanager
def psycopg2_connection(database: Database) -> Iterator[Any]:
    with closing(importlib.import_module("psycopg2").connect(database.url)) as connection, connection:
        yield connection


@contextmanager
def psycopg2_cursor(database: Database) -> Iterator[Any]:
    with psycopg2_connection(database) as connection, connection.cursor() as cursor:
        yield cursor


@contextmanager
def pg8000_connection(database: Database) -> Iterator[Any]:
    place = urlsplit(database.url)
    where = {"user": place.username, "host": place.hostname, "port": place.port, "database": database.name}
    with closing(importlib.import_module("pg8000.dbapi").connect(**where)) as connection:
        yield connection
        connection.commit()


def sqlalchemy_url(database: Database, driver: str) -> str:
    return database.url.replace("postgresql://", f"postgresql+{driver}://", 1)


@contextmanager
def through_sqlalchemy(
    database: Database, driver: str = "psycopg", begin: Any = sqlalchemy.Engine.begin
) -> Iterator[Any]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(database, driver))
    try:
        with begin(engine) as connection:
            yield connection
    finally:
        engine.dispose()


SYNC: dict[str, Opener] = {
    "psycopg": lambda database: psycopg.connect(database.url),
    "psycopg cursor": psycopg_cursor,
    "psycopg raw cursors": lambda database: psycopg.connect(database.url, cursor_factory=psycopg.RawCursor),
    "psycopg client cursors": lambda database: psycopg.connect(database.url, cursor_factory=psycopg.ClientCursor),
    "psycopg transaction in autocommit": psycopg_transaction_in_autocommit,
    "psycopg2": psycopg2_connection,
    "psycopg2 cursor": psycopg2_cursor,
    "pg8000": pg8000_connection,
    "SQLAlchemy": through_sqlalchemy,
    "SQLAlchemy over psycopg2": partial(through_sqlalchemy, driver="psycopg2"),
    "SQLAlchemy over pg8000": partial(through_sqlalchemy, driver="pg8000"),
    "SQLAlchemy session": partial(through_sqlalchemy, begin=lambda engine: sessionmaker(engine).begin()),
}


@asynccontextmanager
async def psycopg_async_connection(database: Database) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(database.url) as connection:
        yield connection


@asynccontextmanager
async def psycopg_async_cursor(database: Database) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(database.url) as connection, connection.cursor() as cursor:
        yield cursor


@asynccontextmanager
async def asyncpg_transaction(database: Database) -> AsyncIterator[Any]:
    connection = await importlib.import_module("asyncpg").connect(database.url)
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def asyncpg_pool(database: Database) -> AsyncIterator[Any]:
    async with (
        importlib.import_module("asyncpg").create_pool(database.url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        yield connection


@asynccontextmanager
async def through_async_sqlalchemy(
    database: Database, driver: str = "psycopg", begin: Any = AsyncEngine.begin
) -> AsyncIterator[Any]:
    engine = create_async_engine(sqlalchemy_url(database, driver))
    try:
        async with begin(engine) as connection:
            yield connection
    finally:
        await engine.dispose()


ASYNC: dict[str, AsyncOpener] = {
    "psycopg": psycopg_async_connection,
    "psycopg cursor": psycopg_async_cursor,
    "asyncpg": asyncpg_transaction,
    "asyncpg pool": asyncpg_pool,
    "SQLAlchemy": through_async_sqlalchemy,
    "SQLAlchemy over asyncpg": partial(through_async_sqlalchemy, driver="asyncpg"),
    "SQLAlchemy session": partial(through_async_sqlalchemy, begin=lambda engine: async_sessionmaker(engine).begin()),
}

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EVERYTHING: dict[str, Any] = {
    "key": "cust:ömer % ?",
    "aggregate_type": "order",
    "aggregate_id": "o-1",
    "headers": {"tenant": 'a "quoted" \\ ü'},
    "tags": ["eu", 'odd"{},\\ tag'],
    "traceparent": TRACE,
}
WRITTEN = ("cust:ömer % ?", b'{"n":1}', "application/json", EVERYTHING["headers"], EVERYTHING["tags"], TRACE)


class Rolled(Exception):
    """Rolls a transaction back."""


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]


@pytest.mark.parametrize("opener", SYNC.values(), ids=SYNC)
def test_an_event_is_stored_with_all_its_fields(newest_outbox: Database, opener: Opener) -> None:
    with opener(newest_outbox) as connection:
        event_id = emit(connection, "order.placed", {"n": 1}, **EVERYTHING)
    assert emitted(newest_outbox) == [(event_id, "order.placed", *WRITTEN)]


@pytest.mark.parametrize("opener", SYNC.values(), ids=SYNC)
def test_many_events_of_all_payload_types_keep_their_order(newest_outbox: Database, opener: Opener) -> None:
    payloads: list[Any] = [None, b"\x00\xff", "[1]", {"n": 2}, 3, [True, None]]
    events = [NewEvent("n", payload, key=str(number)) for number, payload in enumerate(payloads)]
    with opener(newest_outbox) as connection:
        ids = emit_many(connection, events)
        assert emit_many(connection, []) == []
    rows = emitted(newest_outbox)
    assert [row[0] for row in rows] == ids
    assert [row[3] for row in rows] == [None, b"\x00\xff", b"[1]", b'{"n":2}', b"3", b"[true,null]"]
    assert [row[4] for row in rows].count("application/octet-stream") == 1


@pytest.mark.parametrize("opener", SYNC.values(), ids=SYNC)
def test_a_rolled_back_transaction_writes_no_event(newest_outbox: Database, opener: Opener) -> None:
    def business() -> None:
        with opener(newest_outbox) as connection:
            emit(connection, "order.placed", {})
            raise Rolled

    with pytest.raises(Rolled):
        business()
    assert emitted(newest_outbox) == []


@pytest.mark.parametrize("opener", ASYNC.values(), ids=ASYNC)
async def test_events_are_written_through_an_async_connection(newest_outbox: Database, opener: AsyncOpener) -> None:
    async with opener(newest_outbox) as connection:
        event_id = await emit(connection, "order.placed", {"n": 1}, **EVERYTHING)
        more = await emit_many(connection, [NewEvent("a", b"\x00"), NewEvent("b")])
    assert emitted(newest_outbox)[0] == (event_id, "order.placed", *WRITTEN)
    assert [row[0] for row in emitted(newest_outbox)] == [event_id, *more]

    async def business() -> None:
        async with opener(newest_outbox) as connection:
            await emit(connection, "order.placed", {})
            raise Rolled

    with pytest.raises(Rolled):
        await business()
    assert len(emitted(newest_outbox)) == 3


def test_more_events_than_one_statement_can_hold_keep_their_order(outbox: Database) -> None:
    with psycopg.connect(outbox.url) as connection:
        ids = emit_many(connection, (NewEvent("n", {"n": number}, key="k") for number in range(2_345)))
    assert [row[0] for row in emitted(outbox)] == ids


def test_an_event_is_written_to_the_named_outbox(outbox: Database) -> None:
    outbox.execute("""select mailboat.create_outbox('shop."Out Box"')""")
    with psycopg.connect(outbox.url) as connection:
        event_id = emit(connection, "order.placed", {}, outbox='shop."Out Box"')
    assert outbox.execute("""select event_id from shop."Out Box" """) == [(event_id,)]
    assert emitted(outbox) == []


@pytest.mark.parametrize("name", ["outbox", "a.b.c", "a.b; drop table x", 'a."b%s"', "", "a.b--"])
def test_an_invalid_outbox_name_is_refused(newest_outbox: Database, name: str) -> None:
    with (
        psycopg.connect(newest_outbox.url) as connection,
        pytest.raises(EmitRefused, match="outbox must be a table's name"),
    ):
        emit(connection, "order.placed", {}, outbox=name)


# ---- autocommit ---------------------------------------------------------------------------------------------------


def test_autocommit_outside_a_transaction_is_refused(newest_outbox: Database) -> None:
    with psycopg.connect(newest_outbox.url, autocommit=True) as connection:
        with pytest.raises(EmitRefused, match="autocommit mode and in no transaction"):
            emit(connection, "order.placed", {})
        with pytest.raises(EmitRefused, match="autocommit"), connection.cursor() as cursor:
            emit(cursor, "order.placed", {})

    connection2 = importlib.import_module("psycopg2").connect(newest_outbox.url)
    connection2.autocommit = True
    with pytest.raises(EmitRefused, match="autocommit"):
        emit(connection2, "order.placed", {})
    connection2.close()

    engine = sqlalchemy.create_engine(sqlalchemy_url(newest_outbox, "psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as by_sqlalchemy, pytest.raises(EmitRefused, match="autocommit"):
        emit(by_sqlalchemy, "order.placed", {})
    engine.dispose()
    assert emitted(newest_outbox) == []


async def test_async_autocommit_outside_a_transaction_is_refused(newest_outbox: Database) -> None:
    async with await psycopg.AsyncConnection.connect(newest_outbox.url, autocommit=True) as connection:
        with pytest.raises(EmitRefused, match="autocommit"):
            await emit(connection, "order.placed", {})

    through_asyncpg = await importlib.import_module("asyncpg").connect(newest_outbox.url)
    with pytest.raises(EmitRefused, match="autocommit"):
        await emit(through_asyncpg, "order.placed", {})
    await through_asyncpg.close()

    for driver in ("psycopg", "asyncpg"):
        engine = create_async_engine(sqlalchemy_url(newest_outbox, driver), isolation_level="AUTOCOMMIT")
        async with engine.connect() as by_sqlalchemy:
            with pytest.raises(EmitRefused, match="autocommit"):
                await emit(by_sqlalchemy, "order.placed", {})
        await engine.dispose()
    assert emitted(newest_outbox) == []


@pytest.mark.parametrize("thing", [object(), None, 3, "postgresql://…"])
def test_an_argument_that_is_no_connection_is_refused(thing: Any) -> None:
    with pytest.raises(EmitRefused, match="give a connection of psycopg, SQLAlchemy"):
        emit(thing, "order.placed", {})


# ---- order of a key -----------------------------------------------------------------------------------------------


def test_pending_changes_of_a_session_are_flushed_before_the_event(newest_outbox: Database) -> None:
    """Otherwise the event would get its position before the session locks the row."""
    newest_outbox.execute("create table orders (id text primary key, state text)")
    newest_outbox.execute("insert into orders values ('o-1', 'new')")
    engine = sqlalchemy.create_engine(sqlalchemy_url(newest_outbox, "psycopg"))
    with Session(engine) as session, session.begin():
        session.get_one(Order, "o-1").state = "paid"
        emit(session, "order.paid", {}, aggregate_id="o-1")
        with psycopg.connect(newest_outbox.url) as other, pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("select from orders where id = 'o-1' for update nowait")
    engine.dispose()
