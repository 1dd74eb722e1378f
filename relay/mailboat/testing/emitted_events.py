"""Events emitted by the caller's open transaction, for tests of producers."""

import inspect
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from mailboat.emitter.validation import OutboxRow

_EMITTED: Final = (
    "select event_id::text, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers::text, tags,"
    " traceparent from {} where xid = pg_current_xact_id() order by id"
)


@dataclass(frozen=True, slots=True)
class EmittedEvent:
    """An event that was written, possibly not committed yet."""

    id: UUID
    type: str
    key: str | None
    payload: bytes | None
    headers: Mapping[str, str]
    tags: tuple[str, ...]
    aggregate_type: str | None
    aggregate_id: str | None
    content_type: str
    traceparent: str | None

    def json(self) -> Any:
        return None if self.payload is None else json.loads(self.payload)


def of_row(row: OutboxRow) -> EmittedEvent:
    """Convert a row written by ``emit``."""
    return EmittedEvent(
        UUID(row.event_id),
        row.event_type,
        row.key,
        row.payload,
        json.loads(row.headers) if row.headers else {},
        tuple(json.loads(f"[{row.tags[1:-1]}]")),  # a Postgres array literal whose elements are all quoted
        row.aggregate_type,
        row.aggregate_id,
        row.content_type,
        row.traceparent,
    )


def emitted(connection: Any, *, outbox: str = "mailboat.outbox") -> Any:
    """Return the events of the open transaction, in order; for an asynchronous connection, an awaitable of them.

    Accepts connections of psycopg and SQLAlchemy, and SQLAlchemy's sessions. The user must have SELECT on the outbox.
    """
    statement = _EMITTED.format(outbox)
    if "sqlalchemy" in {cls.__module__.partition(".")[0] for cls in type(connection).__mro__}:
        from sqlalchemy import text

        found = connection.execute(text(statement))
    else:
        found = connection.execute(statement.encode())
    if inspect.isawaitable(found):
        return _later(found)
    return [_event(row) for row in found.fetchall()]


async def _later(found: Any) -> list[EmittedEvent]:
    rows = (await found).fetchall()
    return [_event(row) for row in (await rows if inspect.isawaitable(rows) else rows)]


def assert_emitted(
    connection: Any,
    type: str,
    payload: Any = ...,
    *,
    key: str | None = ...,  # type: ignore[assignment]
    headers: Mapping[str, str] = ...,  # type: ignore[assignment]
    times: int = 1,
    outbox: str = "mailboat.outbox",
) -> EmittedEvent | Coroutine[Any, Any, EmittedEvent]:
    """Assert that the open transaction has emitted such an event ``times`` times, and return the first one.

    Omitted arguments are not compared. The error message lists the emitted events.
    """
    expected = {"payload": payload, "key": key, "headers": headers}
    found = emitted(connection, outbox=outbox)
    if inspect.isawaitable(found):

        async def later() -> EmittedEvent:
            return _checked(await found, type, expected, times)

        return later()
    return _checked(found, type, expected, times)


def _checked(found: Sequence[EmittedEvent], type: str, expected: Mapping[str, Any], times: int) -> EmittedEvent:
    matching = [event for event in found if event.type == type and _matches(event, expected)]
    if len(matching) != times or not matching:
        listed = "\n".join(f"  {event.type} key={event.key} {event.payload!r}" for event in found) or "  nothing"
        expectation = ", ".join(f"{name}={value!r}" for name, value in expected.items() if value is not ...)
        raise AssertionError(
            f"{type} ({expectation}) was emitted {len(matching)} times, not {times}. Emitted:\n{listed}"
        )
    return matching[0]


def _matches(event: EmittedEvent, expected: Mapping[str, Any]) -> bool:
    for name, value in expected.items():
        if value is ...:
            continue
        is_json = name == "payload" and not isinstance(value, bytes)
        if value != (event.json() if is_json else getattr(event, name)):
            return False
    return True


def _event(row: Sequence[Any]) -> EmittedEvent:
    return EmittedEvent(
        id=UUID(row[0]),
        type=row[1],
        aggregate_type=row[2],
        aggregate_id=row[3],
        key=row[4],
        payload=None if row[5] is None else bytes(row[5]),
        content_type=row[6],
        headers=json.loads(row[7]) if row[7] else {},
        tags=tuple(row[8]),
        traceparent=row[9],
    )
