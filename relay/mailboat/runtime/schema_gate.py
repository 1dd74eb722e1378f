"""Preparation of a session: schema migration or verification.

A relay may have to wait for a migration started by another relay or a person, or for a server that does not answer.
It reports the reason of the wait, and a stop request ends the wait (`shutdown.unless_stopped`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mailboat.errors import MailboatError
from mailboat.store.connection import PostgresConnection, UrlProvider, explained
from mailboat.store.schema.migrate import MigrationReport, apply_migrations
from mailboat.store.schema.verify import verify_or_refuse
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import OutboxRelaySpec

log = logging.getLogger(__name__)


class SchemaGate:
    """The schema of one relay's outbox: migrated, or only verified if the relay does not manage it."""

    def __init__(self, relay: str, report_wait: Callable[[str], None]) -> None:
        self.ready = False
        self.missing_roles = ""
        """SQL that creates group roles which the relay's user may not create; empty if none is missing."""
        self._about = {"relay": relay}
        self._report_wait = report_wait
        self.migrating = False
        """Whether migrations are being applied. If cancelled, the next relay would have to start them again."""

    async def prepare(self, url: UrlProvider, spec: OutboxRelaySpec, deadline: float) -> None:
        """Migrate or verify the schema. Raise ``SchemaMismatch`` if a person has to act."""
        link = await PostgresConnection.open(url, "schema", deadline=deadline, pooler=spec.database.pooler)
        try:
            if spec.outbox.manage_schema:
                report = await apply_migrations(
                    link.connection, spec.outbox.table, deadline=deadline, waits=self._report_wait, begins=self._begins
                )
                if report.applied:
                    log.info("Schema migrated.", extra={**self._about, "applied": list(report.applied)})
                self._note_roles(report)
            else:
                async with explained(link.connection, deadline):
                    await verify_or_refuse(
                        link.connection, TableLayout(spec.outbox.table, renamed(spec.outbox.columns))
                    )
            self.ready = True
        except MailboatError:
            self.ready = False
            raise
        finally:
            self.migrating = False
            await link.close()

    def _note_roles(self, report: MigrationReport) -> None:
        remedy = report.sql_for_an_administrator
        if remedy and remedy != self.missing_roles:
            log.warning(
                "Roles are missing that this user may not create; an administrator should run: %s",
                " ".join(remedy.split()),
                extra={**self._about, "roles": list(report.missing_roles)},
            )
        self.missing_roles = remedy

    def _begins(self, step: str) -> None:
        self.migrating = True
        self._report_wait(f"migration {step} is being applied")
