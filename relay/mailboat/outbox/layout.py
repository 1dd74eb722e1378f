"""How an outbox table is laid out: which column holds what, and how an event is selected from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import LiteralString

from psycopg import sql

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
    "traceparent": "{}::text",
}
"""Columns that a table of somebody's own may have as varchar or uuid, or leave empty, and what is read instead."""

_AS_TEXT = sql.SQL(
    "found.id, found.event_id::text, found.event_type, found.aggregate_type, found.aggregate_id, found.key, {payload},"
    " found.content_type, found.headers::text, found.tags::text, found.traceparent,"
    """ to_char(found.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), found.slot"""
)
"""An ``Event``, in the order of its fields, with as little to parse as can be."""

COLUMNS: sql.Composable = _AS_TEXT.format(payload=sql.SQL("found.payload"))


def scanned(single: bool) -> sql.Composable:
    """Like ``COLUMNS``, for rows of which some are only looked at: those leave their payload in the database."""
    hit = sql.SQL("found.routes" if single else "cardinality(found.routes) > 0")
    return _AS_TEXT.format(payload=sql.SQL("case when {} and not found.too_big then found.payload end").format(hit))


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
