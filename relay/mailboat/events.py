"""The two shapes an event has inside a relay: as read from the outbox, and as handed to a sink.

Both are tuples with names: a relay moves a hundred thousand of them a second, so an event costs one tuple on its way in
and one on its way out, and nothing is parsed that can be passed through.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TOO_LARGE: Final = "mailboat: not read, bytes: "
"""Begins the ``headers``, a JSON string, of an event whose row is larger than a relay can carry; its size follows.

Only a table that Mailboat did not make has such rows. The event has no payload then, and must not be delivered."""


class Event(NamedTuple):
    """One outbox row, as the read statements return it (``sql/`` lists the columns in this order)."""

    id: int
    """The position. Orders events; is not an identity (a crash may hand the same one out again)."""
    event_id: str
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    key: str | None
    """What order is kept by; None: no order wanted."""
    payload: bytes | None
    """Untouched bytes; None is a tombstone."""
    content_type: str
    headers: str | None
    """The application's own headers as JSON text, an object of strings (or ``TOO_LARGE``); None when there are none."""
    tags: str
    """A Postgres array as text; only ever handed back to Postgres."""
    traceparent: str | None
    created_at: str
    """RFC 3339 in UTC, set by the server. A time that this can't express stands as Postgres writes it."""
    slot: int
    """The key's hash (or a spread of the id): ``slot % partitions`` is the partition."""


def event_bytes(event: Event) -> int:
    """How much memory an event takes, by the columns that may be large."""
    return len(event.payload or b"") + len(event.headers or "") + len(event.tags)


class Outgoing(NamedTuple):
    """One message for a sink: encoded, and not to be changed any more."""

    event_id: str
    key: str | None
    value: bytes | None
    headers: dict[str, str]
    """In the naming that the sink asked for (``ce_id`` or ``ce-id``)."""
    topic: str | None = None
    """Where to, if not the sink's own destination."""
