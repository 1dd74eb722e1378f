"""Verification of a database with an externally managed schema (``manageSchema: false``).

Every finding has the SQL that fixes it, to be run by an administrator. This module changes nothing. Defects that only
cost speed are findings too: on a table without an index on ``xid``, a relay would read the whole table at every poll.
`PostgresConnection.open` has refused a standby and a server that is too old.

Two rules for the SQL. It changes no column in use: if a column has the wrong type, a new column is derived from it and
named in ``spec.outbox.columns``. And it never makes events wrong: a column that only writers can fill (payload, type,
key) is added only if its values follow from another column. Otherwise the remedy is a comment.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from mailboat.errors import SchemaMismatch
from mailboat.store.connection import explain
from mailboat.store.schema.migrate import RESERVED, known_migrations, pending
from mailboat.store.schema.time_partitions import days_ahead
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout
from mailboat_spec.base import yaml_name

_SQL = {**statements("verify"), "applied": statements("schema")["applied"]}

DAYS_AHEAD = 7
"""Minimum days of time partitions ahead. Fewer are a finding, because a writer without a partition fails."""

MOST_COUNTED = 100_000
"""Rows at which counting stops."""

BOOKKEEPING = ("relays", "wakeup_requests", "subscriptions", "cursors", "parked", "dead_letters")
"""Tables that a relay writes to."""

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


class Finding(NamedTuple):
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


async def verify_or_refuse(connection: psycopg.AsyncConnection[Any], layout: TableLayout) -> None:
    """Raise `SchemaMismatch` with every finding and its remedy, if there are any."""
    findings = await verify(connection, layout)
    if findings:
        count = "one thing is" if len(findings) == 1 else f"{len(findings)} things are"
        about = f"The database is not as Mailboat needs it ({count} missing or different). SQL that fixes it:"
        raise SchemaMismatch("\n".join([about, *map(str, findings)]))


async def verify(connection: psycopg.AsyncConnection[Any], layout: TableLayout) -> list[Finding]:
    try:
        inspection = _Inspection(connection, layout)
        await inspection.run()
    except psycopg.Error as error:
        raise explain(error) from error
    return inspection.findings


async def undeliverable_rows(connection: psycopg.AsyncConnection[Any], layout: TableLayout) -> Finding | None:
    """Return the number of rows without a transaction id, which no relay reads, and the SQL that delivers them.

    Such rows were written before the column existed. They are no defect: somebody else may have delivered them.
    """
    xid = layout.columns.get("xid", "xid")
    statement = sql.SQL(_SQL["without_xid"]).format(outbox=layout.outbox, xid=layout.column("xid"))
    try:
        cursor = await connection.execute(statement, {"most": MOST_COUNTED})
        (count,) = await cursor.fetchone() or (0,)
    except psycopg.Error as error:
        raise explain(error) from error
    if not count:
        return None
    many = "one row has" if count == 1 else f"{count}{'+' if count >= MOST_COUNTED else ''} rows have"
    return Finding(
        f"{many} no transaction id (written before the column existed) and will never be delivered. If they should be,"
        " this delivers them to every subscription:",
        layout.table,
        f'update {layout.table} set "{xid}" = pg_current_xact_id() where "{xid}" is null;',
    )


class _Inspection:
    def __init__(self, connection: psycopg.AsyncConnection[Any], layout: TableLayout) -> None:
        self._connection = connection
        self._layout = layout
        self._outbox = layout.table
        self._names = names = {name: layout.columns.get(name, name) for name in COLUMNS}
        self._where = {"outbox": layout.table, "tables": list(BOOKKEEPING), "xid": names["xid"], "id": names["id"]}
        self.findings: list[Finding] = []

    def _add(self, what: str, where: str, remedy: str) -> None:
        self.findings.append(Finding(what, where, remedy))

    async def run(self) -> None:
        server = await self._row("server")
        assert server is not None, "a query without FROM has a row"
        if server["encoding"] != "UTF8":
            self._add(
                f"its encoding is {server['encoding']}, and events are UTF-8",
                f"database {server['database']}",
                "create database ... encoding 'UTF8' template template0;  -- and move the data there",
            )
        if not server["schema"]:
            self._add("there is no schema mailboat", "schema mailboat", _MIGRATE)
            return
        hidden = [name for (name,) in await self._rows("usable")]
        for name in hidden:
            self._add(f"user {server['user']} may not use it", f"schema {name}", _grant(server))
        if hidden:
            return
        await self._about_history(server)
        if server["missing_tables"]:
            return
        relation = await self._row("relation")
        if relation is None:
            self._add("the table does not exist", self._outbox, f"select mailboat.create_outbox('{self._outbox}');")
            return
        name = relation["name"]
        if name != self._outbox:
            plain = f"{self._outbox.partition('.')[2]}_outbox"
            self._add(RESERVED, name, f"alter table {name} rename to {plain};")
            return
        await self._about_table(relation)
        await self._about_rights(server)

    async def _about_rights(self, server: Mapping[str, Any]) -> None:
        user = f"user {server['user']}"
        roles = await self._rows("relay_role")
        role = roles[0][0] if roles and roles[0][1] else None
        if role and not roles[0][2]:
            self._add(f"{user} lacks role {role}, which relays of this outbox need", user, _grant(server, role=role))
        for (right,) in await self._rows("rights"):
            self._add(f"{user} lacks {right}", user, _grant(server, right, role=role))

    async def _about_history(self, server: Mapping[str, Any]) -> None:
        try:
            async with self._connection.transaction():
                applied = await self._rows("applied")
        except psycopg.errors.UndefinedTable:
            applied = []
        except psycopg.errors.InsufficientPrivilege:
            self._add(
                f"user {server['user']} can't read which migrations were applied",
                "mailboat.migrations",
                _grant(server, "select on mailboat.migrations"),
            )
            return
        missing = pending(known_migrations(), applied)
        if missing:
            names = ", ".join(step.name for step in missing)
            self._add(f"migrations were not applied: {names}", "mailboat.migrations", _MIGRATE)
        elif server["missing_tables"]:
            self._add("tables are missing: " + ", ".join(server["missing_tables"]), "schema mailboat", _GONE)

    async def _about_table(self, relation: Mapping[str, Any]) -> None:
        name = relation["name"]
        present = {column: Present(*facts) for column, *facts in await self._rows("columns")}
        self.findings += _about_columns(name, self._names, present)
        xid, position = self._names["xid"], self._names["id"]
        for column, indexed in ((xid, relation["xid_index"]), (position, relation["id_index"])):
            if column in present and not indexed:
                self._add("no index begins with it", f"{name}.{column}", f'create index on {name} ("{column}");')
        if position in present and relation["id_index"] and await self._has_lost_ids():
            self._add(
                "there are events with a position of 0 or less, which are never delivered",
                f"{name}.{position}",
                f'alter table {name} add check ("{position}" > 0) not valid;  -- and insert those events again',
            )
        if relation["sequence"] is None and position in present:
            self._add(
                "its default takes no number from a sequence",
                f"{name}.{position}",
                f'create sequence {name}_position_seq cache 1; alter table {name} alter column "{position}"'
                f" set default nextval('{name}_position_seq');",
            )
        elif relation["cache"] not in (None, 1):
            self._add(
                f"it caches {relation['cache']} numbers per session, which breaks the order of keys",
                f"sequence {relation['sequence']}",
                f"alter sequence {relation['sequence']} cache 1;",
            )
        if relation["hides_rows"]:
            self._add(
                "row level security may hide events from this user, and relays refuse to read it",
                name,
                f"alter table {name} disable row level security;  -- or: alter role <the relay's user> bypassrls;",
            )
        if not relation["notifies"]:
            self._add(
                "no trigger wakes a sleeping relay (events would wait for the next poll)",
                name,
                f"create trigger mailboat_notify after insert on {name} for each statement"
                f" execute function mailboat.notify_on_insert('{name}');",
            )
        ((registered,),) = await self._rows("registered")
        if not registered:
            self._add(
                "it is not registered as an outbox", name, f"insert into mailboat.outboxes (name) values ('{name}');"
            )
        if relation["kind"] == "p":
            days = await days_ahead(self._connection, self._outbox)
            if days is not None and days < DAYS_AHEAD:
                self._add(
                    f"it has partitions for {days:.1f} days; without one, writers fail",
                    name,
                    f"select mailboat.ensure_partitions('{name}');",
                )

    async def _has_lost_ids(self) -> bool:
        names = {"outbox": self._layout.outbox, "id": self._layout.column("id")}
        try:
            async with self._connection.transaction():
                cursor = await self._connection.execute(sql.SQL(_SQL["lost_ids"]).format(**names))
        except psycopg.errors.InsufficientPrivilege:  # reported as a separate finding
            return False
        return await cursor.fetchone() == (True,)

    async def _row(self, name: str) -> Mapping[str, Any] | None:
        cursor = self._connection.cursor(row_factory=dict_row)
        await cursor.execute(_SQL[name], self._where)
        return await cursor.fetchone()

    async def _rows(self, name: str) -> list[tuple[Any, ...]]:
        cursor = await self._connection.execute(_SQL[name], self._where)
        return await cursor.fetchall()


_MIGRATE = "-- `mailboat migrate --sql` prints it, for a user that may create schemas in this database"
_GONE = "-- the migrations that made them were applied, so they were dropped since: bring them back from a backup"


def _grant(server: Mapping[str, Any], right: str = "usage on schema mailboat", *, role: str | None = None) -> str:
    user = '"' + str(server["user"]).replace('"', '""') + '"'
    if role is None and server["role"]:
        role = "mailboat_relay"
    return f"grant {role or right} to {user};"


def _about_columns(table: str, names: Mapping[str, str], present: Mapping[str, Present]) -> Iterator[Finding]:
    """Yield the defects of the columns. ``names`` maps Mailboat's names to the table's."""
    for name, column in COLUMNS.items():
        column_name = names[name]
        where = f"{table}.{column_name}"
        found = present.get(column_name)
        alter = f'alter table {table} alter column "{column_name}"'
        if found is None or found.kind not in column.types:
            wrong = found and f"the column is {found.kind}, and must be {' or '.join(column.types)}"
            yield Finding(wrong or "the column does not exist", where, _remedy(table, name, names, present))
        elif column.always and not found.always:
            yield Finding("it may be null, and no event can be without it", where, f"{alter} set not null;")
        elif name == "xid" and "pg_current_xact_id()" not in found.default:
            yield Finding(
                "its default must be the transaction's id", where, f"{alter} set default pg_current_xact_id();"
            )


def _remedy(table: str, name: str, names: Mapping[str, str], present: Mapping[str, Present]) -> str:
    """Return the SQL that adds a missing column, or one beside a column of the wrong type, which stays as it is.

    The values of an added column follow from the column of the wrong type, or from the table's column of Mailboat's
    name if there is one. The SQL refers to columns of the right types, even to added ones.
    """
    column, column_name = COLUMNS[name], names[name]
    field = f"spec.outbox.columns.{yaml_name(name)}"
    if column_name in present:
        source, new, use = column_name, f"mailboat_{name}", f"  -- and set {field}: mailboat_{name}"
    else:
        source, new, use = name, column_name, ""
    if (expression := _derived(column, source, present)) is not None:
        kind = "timestamptz" if column.types[0] == "timestamp with time zone" else column.types[0]
        always = " not null" if column.always else ""
        generated = f"{kind}{always} generated always as ({expression}) stored"
        return f'alter table {table} add column "{new}" {generated};{use}'
    if column.written and column_name in present:
        return f'-- add a column of type {column.types[0]} that writers fill, such as "{new}", and set {field}: {new}'
    key, position = (_operand(other, names, present) for other in ("key", "id"))
    addition = column.addition.format(f'"{new}"', key=key, id=position)
    statement = f"alter table {table} {addition};{use}"
    if column.written:
        return f"-- name the column that has it in {field}; if writers are going to fill a new one: {statement}"
    return statement


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
