"""Columns of an outbox table, and the expressions that select an event from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import LiteralString

from psycopg import sql

from mailboat.model import TOO_LARGE
from mailboat_spec import Columns, ColumnsPreset

_STORED: Mapping[str, LiteralString] = {
    "id": "{}",
    "xid": "{}",
    "created_at": "{}",
    "event_id": "{}",
    "event_type": "{}::text",
    "aggregate_type": "{}::text",
    "aggregate_id": "{}::text",
    "key": "{}::text",
    "slot": "coalesce({} & 2147483647, 0)",
    "payload": "{}",
    "content_type": "coalesce({}::text, 'application/json')",
    "headers": "{}",
    "tags": "coalesce({}::text[], '{{}}')",
    "traceparent": "{}::text",
}
"""Columns of an outbox by Mailboat's names, with the conversion of a column that may be varchar, uuid or null in a
user-defined table. A slot is never negative, so that its modulus gives the same partition in SQL and in Python."""

_CREATED_AT: LiteralString = (
    "case when found.created_at >= timestamptz '0001-01-01 00:00:00+00'"
    " and found.created_at < timestamptz '10000-01-01 00:00:00+00'"
    " then to_char(found.created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
    " else found.created_at::text end"
)
"""RFC 3339. A time out of its range stays as Postgres prints it: the event is refused, and stored with that time."""

COLUMNS: sql.Composable = sql.SQL(
    "found.id, found.event_id::text, found.event_type, found.aggregate_type, found.aggregate_id, found.key,"
    " found.payload, found.content_type, found.headers::text, found.tags::text, found.traceparent,"
    f" {_CREATED_AT}, found.slot"
)
"""Fields of an ``OutboxEvent``, in order, in types that need the least parsing."""

ROW_BYTES: sql.Composable = sql.SQL(
    "(coalesce(octet_length(found.payload), 0) + coalesce(octet_length(found.headers::text), 0)"
    " + octet_length(found.tags::text) + octet_length(found.event_type)"
    " + coalesce(octet_length(found.aggregate_type), 0) + coalesce(octet_length(found.aggregate_id), 0)"
    " + coalesce(octet_length(found.key), 0)"
    " + octet_length(found.content_type) + coalesce(octet_length(found.traceparent), 0))"
)
"""Size of a row in bytes when it is read. The length of a text or bytea is available without reading the value. Headers
and tags must be read: the length of their text does not follow from their size on disk."""

TOO_LARGE_COLUMNS: sql.Composable = sql.SQL(
    "found.id, found.event_id::text, left(found.event_type, 255), null::text, null::text,"
    " case when octet_length(found.key) <= 1024 then found.key end, null::bytea, left(found.content_type, 255),"
    " to_json({marker} || %(bytes)s::text)::text, '{{}}'::text, null::text,"
    f" {_CREATED_AT}, found.slot"
).format(marker=sql.Literal(TOO_LARGE))
"""Columns read of a row that is too large for a relay: enough to refuse the event. See ``model.TOO_LARGE``."""


_DEBEZIUM = {
    "id": "position",
    "event_id": "id",
    "event_type": "type",
    "aggregate_type": "aggregatetype",
    "aggregate_id": "aggregateid",
    "key": "aggregateid",
}
"""Column names of Debezium's outbox: ``id`` is the event id; the position is an additional column."""


def renamed(columns: Columns) -> dict[str, str]:
    """Return ``spec.outbox.columns`` as a map from Mailboat's name to the table's name, where they differ."""
    preset = _DEBEZIUM if columns.preset is ColumnsPreset.DEBEZIUM else {}
    given = {name: value for name in _STORED if (value := getattr(columns, name, None)) is not None}
    return {name: value for name, value in (preset | given).items() if name != value}


@dataclass(frozen=True, slots=True)
class TableLayout:
    """An outbox table and its renamed columns."""

    table: str = "mailboat.outbox"
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def outbox(self) -> sql.Composable:
        return sql.Identifier(*self.table.split("."))

    @property
    def regclass(self) -> sql.Composable:
        """The quoted table name as a literal, for a cast to regclass."""
        return sql.Literal(self.outbox.as_string())

    def column(self, name: str) -> sql.Identifier:
        """Return the table's quoted name for Mailboat's column ``name``."""
        return sql.Identifier(self.columns.get(name, name))

    @property
    def rows(self) -> sql.Composable:
        """Subquery on the table with Mailboat's column names, used by every statement that reads events.

        The planner flattens it into the table itself.
        """
        columns = sql.SQL(", ").join(
            sql.SQL("{} as {}").format(
                sql.SQL(conversion).format(sql.Identifier("e", self.columns.get(name, name))), sql.Identifier(name)
            )
            for name, conversion in _STORED.items()
        )
        return sql.SQL("(select {} from {} as e)").format(columns, self.outbox)
