"""Columns of an outbox table, and the expressions that select an event from it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from psycopg import sql

from mailboat.model import TOO_LARGE
from mailboat.store.sql import statements
from mailboat_spec import Columns

_SQL = statements("columns")
_NAMES = re.findall(r"\{(\w+)\}", _SQL["stored"])
"""Mailboat's names of the columns of an outbox."""


def _expressions(name: str, **parts: sql.Composable) -> sql.Composable:
    """Return expressions of ``columns.sql`` on one line: psycopg parses a long statement again for every execution."""
    return sql.SQL(" ".join(_SQL[name].split())).format(**parts)


_CREATED_AT = _expressions("created_at")
COLUMNS = _expressions("columns", created_at=_CREATED_AT)
"""Fields of an ``OutboxEvent``, in order."""
ROW_BYTES = _expressions("row_bytes")
TOO_LARGE_COLUMNS = _expressions("too_large_columns", marker=sql.Literal(TOO_LARGE), created_at=_CREATED_AT)
"""Columns read of a row that is too large for a relay. See ``model.TOO_LARGE``."""

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
    preset = _DEBEZIUM if columns.preset == "debezium" else {}
    given = columns.model_dump(by_alias=False, exclude={"preset"}, exclude_none=True)
    return {name: value for name, value in (preset | given).items() if name != value}


@dataclass(frozen=True, slots=True)
class TableLayout:
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
        """Subquery on the table with Mailboat's column names. The planner flattens it into the table itself."""
        columns = {name: sql.Identifier("e", self.columns.get(name, name)) for name in _NAMES}
        return sql.SQL("(select {} from {} as e)").format(_expressions("stored", **columns), self.outbox)
