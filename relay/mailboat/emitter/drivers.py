"""Adapters that run a statement on the application's connection, the first argument of ``emit``.

Five families are distinguished by the package of the object's class: psycopg, SQLAlchemy, Django, asyncpg, and any
other DB-API 2 driver by the ``paramstyle`` of its module. A connection in autocommit mode is refused: the event must be
in the transaction of the change that it describes.
"""

import inspect
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from mailboat.errors import EmitRefused

Style = Literal["format", "pyformat", "qmark", "numeric", "named", "dollar"]
"""Placeholder syntax of a driver: the paramstyles of DB-API 2, and ``$1``."""

PLACEHOLDERS: dict[Style, str] = {
    "format": "%s",
    "pyformat": "%(p{})s",
    "qmark": "?",
    "numeric": ":{}",
    "named": ":p{}",
    "dollar": "${}",
}
"""Syntax of the parameter with number ``{}``, counted from 1."""

_PQTRANS_IDLE = 0
"""libpq's transaction status of a connection without a transaction."""


class SyncHandle(Protocol):
    """A connection, cursor or session of a synchronous driver."""

    def close(self) -> None: ...


class AsyncHandle(Protocol):
    """A connection, cursor or session of an asynchronous driver."""

    def close(self) -> Coroutine[Any, Any, Any]: ...


@dataclass(frozen=True, slots=True)
class Handle:
    """Runs one statement in the application's transaction. ``run`` returns an awaitable if ``is_async``."""

    style: Style
    is_async: bool
    run: Callable[[str, Sequence[Any]], Any]


def handle_of(connection: Any) -> Handle:
    """Return the handle of a connection. Raise `EmitRefused` if its type is unsupported or it is in autocommit mode."""
    own = getattr(connection, "mailboat_handle", None)  # mailboat.testing, or a wrapper around a driver
    if own is not None:
        return cast(Handle, own())
    packages = {cls.__module__.partition(".")[0] for cls in type(connection).__mro__}
    is_async = inspect.iscoroutinefunction(getattr(type(connection), "close", None))
    if "sqlalchemy" in packages and hasattr(connection, "execute"):
        return _sqlalchemy(connection, is_async)
    if "django" in packages and hasattr(connection, "in_atomic_block"):
        return _django(connection)
    if "psycopg" in packages:
        return _psycopg(connection, is_async)
    if "asyncpg" in packages and hasattr(connection, "is_in_transaction"):
        return _asyncpg(connection)
    if not is_async and (style := _paramstyle(connection)) is not None:
        return _dbapi(connection, style)
    raise EmitRefused(
        f"emit: connection is a {type(connection).__module__}.{type(connection).__qualname__}: give a connection of"
        " psycopg, SQLAlchemy, Django, asyncpg or any DB-API 2 driver (or a psycopg cursor, or a SQLAlchemy session)"
    )


def bundle(style: Style, values: Sequence[Any]) -> Sequence[Any] | dict[str, Any]:
    """Return the parameters in the form that a driver of this style accepts."""
    if style in ("named", "pyformat"):
        return {f"p{number}": value for number, value in enumerate(values, start=1)}
    return values


def _refuse_autocommit() -> None:
    raise EmitRefused(
        "emit: connection is in autocommit mode and in no transaction: the event would be written without the change it"
        " tells about. Open a transaction first (psycopg: `with connection.transaction():`)"
    )


def _psycopg(connection: Any, is_async: bool) -> Handle:
    base = connection.connection if hasattr(connection, "fetchone") else connection
    if base.autocommit and base.info.transaction_status == _PQTRANS_IDLE:
        _refuse_autocommit()
    is_raw = any(cls.__name__ == "RawCursorMixin" for cls in base.cursor_factory.__mro__)
    return Handle("dollar" if is_raw else "format", is_async, base.execute)


def _sqlalchemy(connection: Any, is_async: bool) -> Handle:
    from sqlalchemy import text  # installed, since the connection is one of its objects

    def execute(base: Any, statement: str, values: Sequence[Any]) -> None:
        if hasattr(base, "flush"):
            # Flush pending changes of the session first: their row locks keep the order of a key.
            base.flush()
            base = base.connection()
        if getattr(base.connection.dbapi_connection, "autocommit", False) is True:
            _refuse_autocommit()
        base.execute(text(statement), bundle("named", values))

    def run(statement: str, values: Sequence[Any]) -> Any:
        if not is_async:
            return execute(connection, statement, values)
        target = connection if hasattr(connection, "run_sync") else connection()  # an async_scoped_session
        return target.run_sync(execute, statement, values)

    return Handle("named", is_async, run)


def _django(connection: Any) -> Handle:
    """Return the handle of ``django.db.connection``, or of one of ``django.db.connections``."""
    if connection.vendor != "postgresql":
        raise EmitRefused(f"emit: connection is a {connection.vendor} database of Django: the outbox is in PostgreSQL")
    if not connection.in_atomic_block and connection.get_autocommit():
        raise EmitRefused(
            "emit: connection is in no transaction: the event would be written without the change it tells about. Emit"
            " inside `with transaction.atomic():`, or set ATOMIC_REQUESTS"
        )
    return _through_cursor(connection, "format")


def _asyncpg(connection: Any) -> Handle:
    if not connection.is_in_transaction():
        _refuse_autocommit()
    return Handle("dollar", True, lambda statement, values: connection.execute(statement, *values))


def _dbapi(connection: Any, style: Style) -> Handle:
    base = connection if hasattr(connection, "cursor") else connection.connection
    if getattr(base, "autocommit", False) is True:
        status = getattr(getattr(base, "info", None), "transaction_status", _PQTRANS_IDLE)
        if status == _PQTRANS_IDLE:
            _refuse_autocommit()
    return _through_cursor(base, style)


def _through_cursor(connection: Any, style: Style) -> Handle:
    def run(statement: str, values: Sequence[Any]) -> None:
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement, bundle(style, values))

    return Handle(style, False, run)


def _paramstyle(connection: Any) -> Style | None:
    """Return the ``paramstyle`` of the driver's package or of a module inside it (``pg8000.dbapi``)."""
    if not hasattr(connection, "cursor") and not hasattr(connection, "fetchone"):
        return None
    for cls in type(connection).__mro__:
        name = cls.__module__
        while name:
            style = getattr(sys.modules.get(name), "paramstyle", None)
            if style in PLACEHOLDERS:
                return cast(Style, style)
            name = name.rpartition(".")[0]
    return None
