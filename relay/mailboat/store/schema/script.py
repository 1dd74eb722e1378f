"""A migration as a script, for a database with an externally managed schema (``manageSchema: false``).

The script does the same as ``migrate``, in the same order and in one transaction. An administrator can review and run
it. User-defined outbox tables are left to ``verify``, which reports what they lack.
"""

from __future__ import annotations

from psycopg import AsyncClientCursor

from mailboat.errors import SchemaMismatch
from mailboat.store.admin.overview import pending_migrations
from mailboat.store.connection import PostgresConnection
from mailboat.store.schema.migrate import RESERVED, refuse_encoding
from mailboat.store.sql import statements

_SQL = statements("schema")


class MigrationScript:
    """Scripts for several outboxes, to be run in order. The first script for a database migrates its schema."""

    def __init__(self) -> None:
        self._migrated: set[tuple[int, str]] = set()

    async def script(self, link: PostgresConnection, outbox: str) -> str:
        """Return the script with all pending changes; empty if there are none."""
        async with link.autocommit() as cursor:
            await cursor.execute(_SQL["facts"])
            _, ledger, database, encoding, _ = await cursor.fetchone() or (False, False, "", "", "")
            await cursor.execute(_SQL["outbox"], {"outbox": outbox})
            name, exists = await cursor.fetchone() or (outbox, False)
        refuse_encoding(database, encoding)
        if name != outbox:
            raise SchemaMismatch(f"spec.outbox.table: {name}: {RESERVED}. Choose another name.")
        this_one = (link.server.system_identifier, str(database))
        steps = () if this_one in self._migrated else await pending_migrations(link)
        self._migrated.add(this_one)

        spoken = AsyncClientCursor(link.connection)
        ledger_first = [_SQL["create_ledger"]] if steps and not ledger else []
        parts = []
        for step in steps:
            applied = {"version": step.version, "name": step.name, "checksum": step.checksum}
            parts += [f"-- {step.name}\n{step.script.strip()}", spoken.mogrify(_SQL["record"], applied)]
        if steps:
            parts.append(_SQL["grant_roles"])
        if not exists:
            parts.append(spoken.mogrify(_SQL["create_outbox"], {"outbox": outbox}))
        if not parts:
            return ""
        whole = ["begin", *ledger_first, _SQL["lock"], *parts, "commit"]
        return "\n\n".join(part if part.endswith(";") else f"{part};" for part in whole)
