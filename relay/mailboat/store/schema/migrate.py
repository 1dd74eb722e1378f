"""Migration of a database to the schema that this version of Mailboat needs.

``migrations/`` defines the schema, and this module owns the ledger ``mailboat.migrations``. A step is a numbered file,
or a numbered folder of files that are applied in the order of their names. A run is one transaction under a lock on the
ledger, so any number of relays may start at once, and a relay that dies during a run leaves nothing behind.

A run without pending steps takes no lock and writes at most missing time partitions, so that relays can reconnect while
another process migrates. The wait for the lock is short and repeated, so that a waiting relay can report the holder and
can be stopped.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from mailboat.errors import DatabaseUnavailable, SchemaMismatch
from mailboat.store.connection import PostgresConnection, Row
from mailboat.store.sql import statements
from mailboat_spec.redaction import primary_message

RESERVED: Final = "an outbox's name must be lower case and no reserved word of SQL"

_LOCK_WAIT = 1.0
"""Seconds of one wait for the lock. Relays that start together report nothing before the second wait."""

_LOCKED = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.UniqueViolation,
    psycopg.errors.DuplicateSchema,
    psycopg.errors.DuplicateTable,
)
"""Errors of a migration while another one holds the lock or creates the schema."""

_SQL = statements("schema")
_STEP = re.compile(r"^(\d{4})_\w+(\.sql)?$")


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    script: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the script, independent of git's line-end conversion."""
        return hashlib.sha256(self.script.replace("\r\n", "\n").encode()).hexdigest()

    @property
    def ledger_row(self) -> dict[str, object]:
        return {"version": self.version, "name": self.name, "checksum": self.checksum}


@dataclass(frozen=True, slots=True)
class MigrationReport:
    outbox: str
    """The outbox's name as spelled by Postgres, by which cursors and subscriptions refer to it."""
    applied: tuple[str, ...]
    """The steps applied by this run; empty if the schema was up to date."""
    missing_roles: tuple[str, ...]
    """Group roles that the migrating user was not allowed to create."""

    @property
    def sql_for_an_administrator(self) -> str:
        """SQL that an administrator with CREATEROLE must run to finish; empty if nothing is left to do."""
        if not self.missing_roles:
            return ""
        create = [f"create role {role} nologin;" for role in self.missing_roles]
        return "\n".join([*create, "select mailboat.grant_roles(), mailboat.grant_consumer_role();"])


@cache
def known_migrations() -> tuple[Migration, ...]:
    folder = resources.files("mailboat.store.schema") / "migrations"
    found = []
    for step in sorted(folder.iterdir(), key=lambda step: step.name):
        if match := _STEP.match(step.name):
            files = sorted(step.iterdir(), key=lambda file: file.name) if step.is_dir() else [step]
            script = "\n".join(file.read_text(encoding="utf-8") for file in files)
            found.append(Migration(int(match[1]), step.name, script))
    return tuple(found)


def pending(migrations: Sequence[Migration], applied: Iterable[Row]) -> tuple[Migration, ...]:
    """Return the steps left to apply. ``applied``: version, name and checksum of each step in the ledger.

    Raises `SchemaMismatch` if the ledger does not match this version's steps.
    """
    left = {migration.version: migration for migration in migrations}
    newest = max(left, default=0)
    for version, name, checksum in applied:
        bundled = left.pop(version, None)
        if bundled is None:
            raise SchemaMismatch(
                f"The database has migration {name}, which this version of Mailboat does not know (it knows up to"
                f" {newest:04d}). A newer version of Mailboat migrated it: upgrade this one."
            )
        if bundled.checksum != checksum:
            raise SchemaMismatch(
                f"Migration {name} was applied to this database with another content than {bundled.name} has in"
                " this version of Mailboat. If an unreleased version applied it, create the database again; otherwise"
                " use the version that applied it, or a later one."
            )
    return tuple(left.values())


def migrate(database: Any, outbox: str = "mailboat.outbox") -> MigrationReport:
    """Migrate a database to the schema that this version needs, as ``mailboat migrate`` does. Idempotent.

    ``database``: a URL, or a connection of psycopg, SQLAlchemy (or its engine) or Django, whose server and user are
    used. The migration has a separate connection and transaction, so nothing of the caller is committed.
    """
    conninfo = _conninfo(database)

    async def apply() -> MigrationReport:
        async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
            return await apply_migrations(connection, outbox)

    with ThreadPoolExecutor(1, "mailboat-migrate") as thread:  # the caller may be inside an event loop
        return thread.submit(asyncio.run, apply()).result()


def _conninfo(database: Any) -> str:
    if isinstance(database, str):
        scheme, separator, rest = database.partition("://")
        return f"{scheme.partition('+')[0]}{separator}{rest}" if separator else database
    if isinstance(database, psycopg.Connection | psycopg.AsyncConnection):
        return make_conninfo(database.info.dsn, password=database.info.password or None)
    if hasattr(database, "get_connection_params"):  # Django, whose parameters include some of its own
        known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
        given = database.get_connection_params()
        return make_conninfo(**{name: value for name, value in given.items() if name in known and value is not None})
    engine = getattr(database, "engine", database)
    return _conninfo(engine.url.render_as_string(hide_password=False))


async def apply_migrations(
    connection: psycopg.AsyncConnection[Any],
    outbox_table: str,
    *,
    deadline: float | None = None,
    waits: Callable[[str], None] = lambda _: None,
    begins: Callable[[str], None] = lambda _: None,
) -> MigrationReport:
    """Apply the pending steps and make ``outbox_table`` an outbox, in one transaction.

    While another migration holds the lock, ``waits`` is called repeatedly. ``begins`` is called before each step. From
    the first step on there is no ``deadline``, because its duration is unknown.

    Raises `SchemaMismatch` if the database is newer, was changed, or the user lacks a right. Raises
    `DatabaseUnavailable` on a standby, if the connection breaks, and past the deadline.
    """
    try:
        while True:
            async with asyncio.timeout(deadline) as timeout, connection.transaction(), connection.cursor() as cursor:
                await cursor.execute(_SQL["facts"])
                ledger, _ = _checked(await cursor.fetchall())
                applied: tuple[str, ...] = ()
                if ledger and await _is_made(cursor, outbox_table):
                    await cursor.execute(_SQL["ensure_partitions"], {"outbox": outbox_table})
                else:
                    await _lock(cursor, ledger=ledger)
                    applied = await _migrate(cursor, outbox_table, timeout, begins)
                await cursor.execute(_SQL["missing_roles"])
                missing_roles = tuple(role for (role,) in await cursor.fetchall())
                return MigrationReport(outbox_table, applied, missing_roles)
            # Only a locked migration gets here: `_lock` rolled the transaction back.
            async with asyncio.timeout(deadline), connection.transaction(), connection.cursor() as cursor:
                await cursor.execute(_SQL["lock_holder"])
                holder = await cursor.fetchone()
            if holder is not None:
                who = "process {}, user {}, application {}".format(*holder)
                waits(f"another migration is under way (lock held by {who}): waiting for its end")
    except TimeoutError as error:
        await connection.close()
        raise DatabaseUnavailable(f"Postgres did not answer within {deadline or 0:.0f} s of the migration") from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaMismatch(
            f"The database user may not migrate the schema: {_sentence(error)}. Run `mailboat migrate` as a user that"
            " may create schemas in this database (grant create on database ... to ...), or hand what `mailboat migrate"
            " --sql` prints to one, and let the relay use `manageSchema: false`."
        ) from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"The connection was lost during the migration: {_sentence(error)}.") from error
    except psycopg.Error as error:
        raise SchemaMismatch(f"The migration failed and was rolled back: {_sentence(error)}.") from error


_Cursor = psycopg.AsyncCursor[Row]


async def _is_made(cursor: _Cursor, outbox_table: str) -> bool:
    """Return True if nothing is left to do but to create time partitions."""
    if await _pending(cursor):
        return False
    await cursor.execute(_SQL["made"], {"outbox": outbox_table})
    return await cursor.fetchone() == (True,)


async def _pending(cursor: _Cursor) -> tuple[Migration, ...]:
    await cursor.execute(_SQL["applied"])
    return pending(known_migrations(), await cursor.fetchall())


async def _lock(cursor: _Cursor, *, ledger: bool) -> None:
    """Exclude other migrations. After a short wait for one that is under way, roll the transaction back."""
    await cursor.execute(_SQL["lock_timeout"], {"timeout": f"{_LOCK_WAIT * 1000:.0f}ms"})
    try:
        await cursor.execute(_SQL["lock"] if ledger else _SQL["create_ledger"])
    except _LOCKED as error:
        raise psycopg.Rollback from error
    await cursor.execute(_SQL["lock_timeout"], {"timeout": "0"})


async def _migrate(
    cursor: _Cursor, outbox_table: str, timeout: asyncio.Timeout, begins: Callable[[str], None]
) -> tuple[str, ...]:
    """Apply the pending steps, make the table an outbox, and return the names of the steps."""
    steps = await _pending(cursor)
    for step in steps:
        timeout.reschedule(None)
        begins(step.name)
        await cursor.execute(step.script.encode())
        await cursor.execute(_SQL["record"], step.ledger_row)
    if steps:
        await cursor.execute(_SQL["grant_roles"])
    await cursor.execute(_SQL["create_outbox"], {"outbox": outbox_table})
    (outbox,) = await cursor.fetchone() or (outbox_table,)
    if outbox != outbox_table:
        raise SchemaMismatch(f"spec.outbox.table: {outbox}: {RESERVED}. Nothing was changed: choose another name.")
    return tuple(step.name for step in steps)


async def pending_migrations(link: PostgresConnection) -> tuple[Migration, ...]:
    """Return the steps that ``mailboat migrate`` would apply. Raises ``SchemaMismatch`` as `pending` does."""
    ((_, ledger, *_),) = await link.fetch(_SQL["facts"])
    return pending(known_migrations(), await link.fetch(_SQL["applied"]) if ledger else [])


async def migration_script(link: PostgresConnection, outbox: str, migrated: set[tuple[int, str]]) -> str:
    """Return all pending changes as a script for an administrator (``manageSchema: false``); empty if there are none.

    ``migrated``: databases whose schema an earlier script migrates; this database is added. Scripts are to be run in
    order.
    """
    ledger, database = _checked(await link.fetch(_SQL["facts"]))
    ((name, exists),) = await link.fetch(_SQL["outbox"], {"outbox": outbox})
    if name != outbox:
        raise SchemaMismatch(f"spec.outbox.table: {name}: {RESERVED}. Choose another name.")
    this_one = (link.server.system_identifier, database)
    steps = () if this_one in migrated else await pending_migrations(link)
    migrated.add(this_one)
    literal = psycopg.AsyncClientCursor(link.connection)
    parts = []
    for step in steps:
        parts += [f"-- {step.name}\n{step.script.strip()}", literal.mogrify(_SQL["record"], step.ledger_row)]
    if steps:
        parts.append(_SQL["grant_roles"])
    if not exists:
        parts.append(literal.mogrify(_SQL["create_outbox"], {"outbox": outbox}))
    if not parts:
        return ""
    ledger_first = [_SQL["create_ledger"]] if steps and not ledger else []
    whole = ["begin", *ledger_first, _SQL["lock"], *parts, "commit"]
    return "\n\n".join(part if part.endswith(";") else f"{part};" for part in whole)


def _checked(facts: Sequence[Row]) -> tuple[bool, str]:
    """Return whether the ledger exists, and the database's name. Raise for a database that can't be migrated.

    Texts of events could not be read with another encoding than UTF-8.
    """
    ((standby, ledger, database, encoding),) = facts
    if standby:
        raise DatabaseUnavailable(
            f"Database {database} is a standby (in recovery): it can't be migrated, nor read for events."
            " Connect to the primary (target_session_attrs=primary)."
        )
    if encoding != "UTF8":
        raise SchemaMismatch(
            f"Database {database}: its encoding is {encoding}, and events are UTF-8. Nothing was changed: make one with"
            " create database ... encoding 'UTF8' template template0, and move the data there."
        )
    return ledger, database


def _sentence(error: psycopg.Error) -> str:
    """Return the server's message and hint, without the statement."""
    return ". ".join(part.rstrip(".") for part in (primary_message(error), error.diag.message_hint) if part)
