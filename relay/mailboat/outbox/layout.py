"""How an outbox table is laid out: which column holds what, and how an event is selected from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import LiteralString

from psycopg import sql

from mailboat.events import TOO_LARGE
from mailboat_spec import Columns, ColumnsPreset

_STORED = (
    "id",
    "xid",
    "created_at",
    "event_id",
    "event_type",
    "aggregate_type",
    "aggregate_id",
    "key",
    "slot",
    "payload",
    "content_type",
    "headers",
    "tags",
    "traceparent",
)
"""The columns of an outbox by the names that Mailboat uses for them."""

_OF_ANY_KIND: Mapping[str, LiteralString] = {
    "event_type": "{}::text",
    "aggregate_type": "{}::text",
    "aggregate_id": "{}::text",
    "key": "{}::text",
    "content_type": "coalesce({}::text, 'application/json')",
    "tags": "coalesce({}::text[], '{{}}')",
    "slot": "coalesce({} & 2147483647, 0)",
    "traceparent": "{}::text",
}
"""Columns that a table of somebody's own may have as varchar or uuid, or leave empty, and what is read instead. A slot
is never negative, so that dividing it gives a partition in SQL as in Python."""

_CREATED_AT: LiteralString = (
    "case when found.created_at >= timestamptz '0001-01-01 00:00:00+00'"
    " and found.created_at < timestamptz '10000-01-01 00:00:00+00'"
    " then to_char(found.created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
    " else found.created_at::text end"
)
"""RFC 3339; or, where that can't say it, what Postgres calls it: the event is refused, and kept with that time."""

COLUMNS: sql.Composable = sql.SQL(
    "found.id, found.event_id::text, found.event_type, found.aggregate_type, found.aggregate_id, found.key,"
    " found.payload, found.content_type, found.headers::text, found.tags::text, found.traceparent,"
    f" {_CREATED_AT}, found.slot"
)
"""An ``Event``, in the order of its fields, with as little to parse as can be."""

ROW_BYTES: sql.Composable = sql.SQL(
    "(coalesce(octet_length(found.payload), 0) + coalesce(octet_length(found.headers::text), 0)"
    " + octet_length(found.tags::text) + octet_length(found.event_type)"
    " + coalesce(octet_length(found.aggregate_type), 0) + coalesce(octet_length(found.aggregate_id), 0)"
    " + coalesce(octet_length(found.key), 0)"
    " + octet_length(found.content_type) + coalesce(octet_length(found.traceparent), 0))"
)
"""Bytes that a row has when it is read. The length of a text or bytea is known without reading it; that of headers and
tags is not: how much text they become does not follow from what they take on disk."""

TOO_LARGE_COLUMNS: sql.Composable = sql.SQL(
    "found.id, found.event_id::text, left(found.event_type, 255), null::text, null::text,"
    " case when octet_length(found.key) <= 1024 then found.key end, null::bytea, left(found.content_type, 255),"
    " to_json({marker} || %(bytes)s::text)::text, '{{}}'::text, null::text,"
    f" {_CREATED_AT}, found.slot"
).format(marker=sql.Literal(TOO_LARGE))
"""What is read of a row that is larger than a relay can carry: enough to give it up. See ``events.TOO_LARGE``."""


_DEBEZIUM = {
    "id": "position",
    "event_id": "id",
    "event_type": "type",
    "aggregate_type": "aggregatetype",
    "aggregate_id": "aggregateid",
    "key": "aggregateid",
}
"""Debezium's outbox has its identity in ``id``; the position that Mailboat needs is a column beside it."""


def renamed(columns: Columns) -> dict[str, str]:
    """``spec.outbox.columns`` as Mailboat's name -> the table's name, where they differ."""
    preset = _DEBEZIUM if columns.preset is ColumnsPreset.DEBEZIUM else {}
    given = {name: value for name in _STORED if (value := getattr(columns, name, None)) is not None}
    return {name: value for name, value in (preset | given).items() if name != value}


@dataclass(frozen=True, slots=True)
class Layout:
    """A table and the columns that have other names in it."""

    table: str = "mailboat.outbox"
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def outbox(self) -> sql.Composable:
        """The table, quoted."""
        return sql.Identifier(*self.table.split("."))

    def column(self, name: str) -> sql.Identifier:
        """The table's own name, quoted, for what Mailboat calls ``name``."""
        return sql.Identifier(self.columns.get(name, name))

    @property
    def rows(self) -> sql.Composable:
        """The table as something to select from, under Mailboat's names: whatever reads events reads from here.

        Planned as if it were the table itself.
        """
        columns = sql.SQL(", ").join(
            sql.SQL("{} as {}").format(
                sql.SQL(_OF_ANY_KIND.get(name, "{}")).format(sql.Identifier("e", self.columns.get(name, name))),
                sql.Identifier(name),
            )
            for name in _STORED
        )
        return sql.SQL("(select {} from {} as e)").format(columns, self.outbox)
