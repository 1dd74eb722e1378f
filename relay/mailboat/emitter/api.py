"""Emit events from Python: one INSERT in the application's open transaction.

The connection is the application's: psycopg (sync or async, connection or cursor), SQLAlchemy (Connection or Session,
sync or async), Django, asyncpg, or any DB-API 2 connection (see `mailboat.emitter.drivers`). This module never begins
or commits a transaction: an outbox depends on the application's own transaction.
"""

import itertools
import re
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar, Unpack, overload

from mailboat.emitter.drivers import PLACEHOLDERS, AsyncHandle, Handle, Style, SyncHandle, handle_of
from mailboat.emitter.validation import EventFields, NewEvent, OutboxRow, Payload, checked
from mailboat.errors import EmitRefused

DEFAULT_OUTBOX = "mailboat.outbox"

ROWS_PER_STATEMENT = 1_000
"""A row has ten parameters; the protocol allows 65,535 per statement."""

_NAME = r'(?:[A-Za-z_][A-Za-z0-9_$]*|"[^"%:?\x00]+")'
_TABLE = re.compile(rf"{_NAME}\.{_NAME}")

# Each parameter is text (or bytes) on the wire, and Postgres casts it to the column's type: drivers have little else in
# common.
_COLUMNS = dict.fromkeys(OutboxRow._fields, "cast({} as text)") | {
    "event_id": "cast(cast({} as text) as uuid)",
    "payload": "cast({} as bytea)",
    "headers": "cast(cast({} as text) as jsonb)",
    "tags": "cast(cast({} as text) as text[])",
}

_NO_OUTBOX = "there is no outbox {outbox} in this database. Create it: `mailboat migrate`, or mailboat.migrate(url)."
_REMEDIES = {
    "42501": "this database user may not emit into {outbox}. Let an administrator run: grant mailboat_writer to <the"
    " user>; (an outbox with roles of its own: the writer that mailboat.outboxes names).",
    "42P01": _NO_OUTBOX,
    "3F000": _NO_OUTBOX,
    "23514": "if no partition was found for the row, {outbox} has no time partition for today: run a relay, which makes"
    " them 30 days ahead, or `mailboat maintain`.",
}
"""What to do, by SQLSTATE: insufficient privilege, undefined table, undefined schema, check violation."""

_Result = TypeVar("_Result")


@overload
def emit(
    connection: SyncHandle, type: str, payload: Payload = ..., *, outbox: str = ..., **fields: Unpack[EventFields]
) -> uuid.UUID: ...


@overload
def emit(
    connection: AsyncHandle, type: str, payload: Payload = ..., *, outbox: str = ..., **fields: Unpack[EventFields]
) -> Coroutine[Any, Any, uuid.UUID]: ...


def emit(connection: Any, type: str, payload: Payload = None, *, outbox: str = DEFAULT_OUTBOX, **fields: Any) -> Any:
    """Insert one event in the connection's open transaction and return its id; an awaitable on an async connection.

    The event is published if and only if the transaction commits. Events of one ``key`` (default: the ``aggregate_id``)
    keep their order if writers lock the entity of the key before they emit. If an argument is invalid, raise
    `EmitRefused`, a ValueError that names the argument; nothing was sent to the database.
    """
    row = checked(NewEvent(type, payload, **fields))
    return _insert(connection, outbox, [row], uuid.UUID(row.event_id), "emit")


@overload
def emit_many(connection: SyncHandle, events: Iterable[NewEvent], *, outbox: str = ...) -> list[uuid.UUID]: ...


@overload
def emit_many(
    connection: AsyncHandle, events: Iterable[NewEvent], *, outbox: str = ...
) -> Coroutine[Any, Any, list[uuid.UUID]]: ...


def emit_many(connection: Any, events: Iterable[NewEvent], *, outbox: str = DEFAULT_OUTBOX) -> Any:
    """Validate all events, insert them in this order, a thousand per statement, and return their ids."""
    rows = [checked(event, where=f"events[{index}].") for index, event in enumerate(events)]
    return _insert(connection, outbox, rows, [uuid.UUID(row.event_id) for row in rows], "emit_many")


def _insert(
    connection: Any, outbox: str, rows: Sequence[OutboxRow], result: _Result, name: str
) -> _Result | Coroutine[Any, Any, _Result]:
    """Send the statements of ``emit`` and ``emit_many``, immediately or when awaited, and return ``result``."""
    if not _TABLE.fullmatch(outbox):
        raise EmitRefused(f"emit: outbox must be a table's name with its schema, such as {DEFAULT_OUTBOX}")
    handle = handle_of(connection)
    parts = list(_statements(outbox, handle.style, rows))
    if handle.is_async:
        later = _later(handle, outbox, parts, result)
        later.__qualname__ = f"mailboat.{name}"  # type: ignore[attr-defined]  # shown if an await is forgotten
        return later
    with _explained(outbox):
        for statement, values in parts:
            handle.run(statement, values)
    return result


async def _later(handle: Handle, outbox: str, parts: Sequence[tuple[str, list[Any]]], result: _Result) -> _Result:
    with _explained(outbox):
        for statement, values in parts:
            await handle.run(statement, values)
    return result


@contextmanager
def _explained(outbox: str) -> Iterator[None]:
    """Add the remedy to an error of the database as a note. The error stays the driver's, as the caller expects."""
    try:
        yield
    except Exception as error:
        if (remedy := _REMEDIES.get(_sqlstate(error) or "")) is not None:
            error.add_note(f"mailboat.emit: {remedy.format(outbox=outbox)}")
        raise


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error, also if SQLAlchemy or Django has wrapped it."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if code is None and (details := getattr(each, "args", None)) and isinstance(details[0], dict):
            code = details[0].get("C")  # pg8000
        if isinstance(code, str):
            return code
    return None


def _statements(outbox: str, style: Style, rows: Sequence[OutboxRow]) -> Iterator[tuple[str, list[Any]]]:
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        part = rows[start : start + ROWS_PER_STATEMENT]
        yield _statement(outbox, style, len(part)), [value for row in part for value in row]


@lru_cache(maxsize=64)
def _statement(outbox: str, style: Style, count: int) -> str:
    placeholders = map(PLACEHOLDERS[style].format, itertools.count(1))
    tuples = (f"({', '.join(map(str.format, _COLUMNS.values(), placeholders))})" for _ in range(count))
    return f"insert into {outbox} ({', '.join(_COLUMNS)}) values {', '.join(tuples)}"
