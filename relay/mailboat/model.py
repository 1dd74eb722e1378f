"""The two forms of an event inside a relay: as read from the outbox, and as passed to a sink.

Both are named tuples: a relay moves a hundred thousand events per second, so an event costs one tuple when it is read
and one when it is published. Values that can be passed through are not parsed.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, cast

TOO_LARGE: Final = "mailboat: not read, bytes: "
"""Prefix of ``headers``, here a JSON string, of an event whose row is too large for a relay; the size follows.

Only a table that Mailboat did not create can contain such rows. The event has no payload and must not be delivered."""


class OutboxEvent(NamedTuple):
    """One outbox row, as the read statements return it (``sql/`` lists the columns in this order)."""

    id: int
    """The position. It orders events but is no identity: after a crash the same position may be assigned again."""
    event_id: str
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    key: str | None
    """Order is kept per key; None means no order."""
    payload: bytes | None
    """Unchanged bytes; None is a tombstone."""
    content_type: str
    headers: str | None
    """The application's headers as JSON text, an object of strings (or ``TOO_LARGE``); None without headers."""
    tags: str
    """A Postgres array as text, only ever passed back to Postgres."""
    traceparent: str | None
    created_at: str
    """RFC 3339 in UTC, set by the server. A time outside RFC 3339 is in the notation of Postgres."""
    slot: int
    """Hash of the key (without a key, derived from the id): ``slot % partitions`` is the partition."""


def event_bytes(event: OutboxEvent) -> int:
    """Return the approximate memory of an event, from the columns that may be large."""
    return len(event.payload or b"") + len(event.headers or "") + len(event.tags)


class Message(NamedTuple):
    """One encoded message for a sink. It must not be modified."""

    event_id: str
    key: str | None
    value: bytes | None
    headers: dict[str, str]
    """Headers with the sink's prefix (``ce_id`` or ``ce-id``)."""
    topic: str | None = None
    """Topic, if not the sink's own destination."""


def verbatim(event_id: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> Message:
    """Return a message for Kafka with exactly these bytes, and with headers in this order, repeated names included.

    librdkafka takes bytes and pairs as well as the texts of ``Message``. Only ``publish`` of the Kafka sink may get
    the message: no other sink has such keys and headers.
    """
    return Message(event_id, cast("str | None", key), value, cast("dict[str, str]", list(headers)))
