"""Verification of the columns of an outbox, with the SQL that adds a missing one.

Two rules for the SQL. It changes no column in use: if a column has the wrong type, a new column is derived from it and
named in ``spec.outbox.columns``. And it never makes events wrong: a column that only writers can fill (payload, type,
key) is added only if its values follow from another column. Otherwise the remedy is a comment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from mailboat_spec.base import yaml_name

_TEXT: Final = ("text", "character varying")
_AS_TEXT: Final = dict.fromkeys(("integer", "bigint", "smallint", "uuid", "boolean"), "{0}::text")
"""Types whose text is immutable, so that a generated column can be made of it."""
_DOCUMENTS: Final = ("jsonb", "json", *_TEXT)


class Present(NamedTuple):
    kind: str
    default: str
    """Expression of the default, or of a generated column."""
    always: bool
    generated: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect of the database."""

    what: str
    where: str
    sql: str
    """The SQL that fixes it; a comment if no SQL can."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n    {self.sql}"


@dataclass(frozen=True, slots=True)
class Column:
    """Permitted types of a column of the outbox, and the clause that adds it to a table with existing events."""

    types: tuple[str, ...]
    addition: str
    """Clause for ``alter table``. Placeholders: ``{0}`` is the name, others are Mailboat's names of columns."""
    derivations: Mapping[str, str] | None = None
    """Expression that computes the value from ``{0}``, a column of another type, by that type."""
    always: bool = False
    """True if the column must not be null."""
    written: bool = False
    """Only writers can fill it: an added column without values would make events wrong."""


_BYTES: Final = r"replace({0}::text, '\', '\\')::bytea"  # convert_to is not immutable
COLUMNS: Mapping[str, Column] = {
    "id": Column(("bigint", "integer"), "add column {0} bigint generated always as identity", always=True),
    "xid": Column(("xid8",), "add column {0} xid8, alter column {0} set default pg_current_xact_id()"),
    "created_at": Column(
        ("timestamp with time zone",),
        "add column {0} timestamptz not null default now()",
        {"timestamp without time zone": "{0} at time zone 'UTC'"},
        always=True,
    ),
    "event_id": Column(
        ("uuid",),
        "add column {0} uuid not null default gen_random_uuid()",
        dict.fromkeys(_TEXT, "{0}::uuid"),
        always=True,
    ),
    "event_type": Column(_TEXT, "add column {0} text not null default 'event'", _AS_TEXT, always=True, written=True),
    "aggregate_type": Column(_TEXT, "add column {0} text", _AS_TEXT),
    "aggregate_id": Column((*_TEXT, "uuid"), "add column {0} text", _AS_TEXT),
    "key": Column(_TEXT, "add column {0} text", _AS_TEXT, written=True),
    "slot": Column(("integer",), "add column {0} integer generated always as (mailboat.key_slot({key}, {id})) stored"),
    "payload": Column(("bytea",), "add column {0} bytea", dict.fromkeys(_DOCUMENTS, _BYTES), written=True),
    "content_type": Column(_TEXT, "add column {0} text not null default 'application/json'"),
    "headers": Column(("jsonb", "json"), "add column {0} jsonb", dict.fromkeys(_TEXT, "{0}::jsonb")),
    "tags": Column(("text[]", "character varying[]"), "add column {0} text[] not null default '{{}}'"),
    "traceparent": Column(_TEXT, "add column {0} text"),
}


def about_columns(table: str, names: Mapping[str, str], present: Mapping[str, Present]) -> Iterator[Finding]:
    """Yield the defects of the columns. ``names`` maps Mailboat's names to the table's."""
    for name, column in COLUMNS.items():
        column_name = names[name]
        where = f"{table}.{column_name}"
        if column_name not in present:
            yield Finding("the column does not exist", where, _addition(table, name, names, present))
            continue
        found = present[column_name]
        alter = f'alter table {table} alter column "{column_name}"'
        if found.kind not in column.types:
            what = f"the column is {found.kind}, and must be {' or '.join(column.types)}"
            yield Finding(what, where, _replacement(table, name, names, present))
        elif column.always and not found.always:
            yield Finding("it may be null, and no event can be without it", where, f"{alter} set not null;")
        elif name == "xid" and "pg_current_xact_id()" not in found.default:
            yield Finding(
                "its default must be the transaction's id", where, f"{alter} set default pg_current_xact_id();"
            )


def _addition(table: str, name: str, names: Mapping[str, str], present: Mapping[str, Present]) -> str:
    """Return the SQL that adds a missing column, derived from the table's column of Mailboat's name if there is one."""
    column, column_name = COLUMNS[name], names[name]
    if (expression := _derived(column, name, present)) is not None:
        return _generated(table, column_name, column, expression)
    statement = f"alter table {table} {_clause(name, column_name, names, present)};"
    if not column.written:
        return statement
    field = f"spec.outbox.columns.{yaml_name(name)}"
    return f"-- name the column that has it in {field}; if writers are going to fill a new one: {statement}"


def _replacement(table: str, name: str, names: Mapping[str, str], present: Mapping[str, Present]) -> str:
    """Return the SQL that adds a column beside one of the wrong type, which stays as it is."""
    column, column_name, new = COLUMNS[name], names[name], f"mailboat_{name}"
    use = f"  -- and set spec.outbox.columns.{yaml_name(name)}: {new}"
    if (expression := _derived(column, column_name, present)) is not None:
        return _generated(table, new, column, expression) + use
    if column.written:
        return (
            f'-- add a column of type {column.types[0]} that writers fill, such as "{new}",{use.removeprefix("  --")}'
        )
    return f"alter table {table} {_clause(name, new, names, present)};{use}"


def _clause(name: str, new: str, names: Mapping[str, str], present: Mapping[str, Present]) -> str:
    """Return the clause that adds a column. It refers to columns of the right types, even to added ones."""
    return COLUMNS[name].addition.format(
        f'"{new}"', **{other: _operand(other, names, present) for other in ("key", "id")}
    )


def _operand(name: str, names: Mapping[str, str], present: Mapping[str, Present]) -> str:
    """Return an expression for the value of a column: a generated column must not refer to another one."""
    column_name = names[name]
    found = present.get(column_name)
    if found is None or found.kind in COLUMNS[name].types:
        return found.default if found is not None and found.generated else f'"{column_name}"'
    return _derived(COLUMNS[name], column_name, present) or f'"mailboat_{name}"'


def _derived(column: Column, source: str, present: Mapping[str, Present]) -> str | None:
    """Return the expression that makes the value of ``column`` from an existing column; None if there is none."""
    found = present.get(source)
    pattern = (column.derivations or {}).get(found.kind) if found is not None else None
    return None if pattern is None else pattern.format(f'"{source}"')


def _generated(table: str, name: str, column: Column, expression: str) -> str:
    kind = "timestamptz" if column.types[0] == "timestamp with time zone" else column.types[0]
    always = " not null" if column.always else ""
    return f'alter table {table} add column "{name}" {kind}{always} generated always as ({expression}) stored;'
