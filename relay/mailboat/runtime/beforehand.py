"""What comes before a session: a schema to work with, and an ear for whoever says that there is to be no session.

Before it, a relay may have to wait for others: for a migration that another relay or a person has begun, for a server
that does not answer. It says what it waits for, and is told to stop like anybody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mailboat.errors import MailboatError
from mailboat.outbox.layout import renamed
from mailboat.outbox.link import Link, UrlProvider, explained
from mailboat.outbox.migrate import migrate
from mailboat.outbox.verify import verify_or_refuse
from mailboat_spec import OutboxRelaySpec

log = logging.getLogger(__name__)

T = TypeVar("T")


class ToldToStop(Exception):
    """Before there was a session that could end in good order."""


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T], in_the_middle: Callable[[], bool] = bool) -> T:
    """The answer of ``work``, which is cut short by ``stop`` unless it is in the middle of something."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not in_the_middle():
            task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            raise ToldToStop
        return task.result()
    finally:
        stopping.cancel()
        if not task.done():  # we are cancelled ourselves, and leave nothing behind
            task.cancel()
            await asyncio.wait({task})


class Schema:
    """The schema of one relay's outbox: migrated, or looked at where others look after it."""

    def __init__(self, relay: str, tell: Callable[[str], None]) -> None:
        self.ready = False
        self._about = {"relay": relay}
        self._tell = tell
        self._migrating = False

    def in_the_middle(self) -> bool:
        """Migrations are being applied. To cut them would only mean that the next relay begins them anew."""
        return self._migrating

    async def prepare(self, url: UrlProvider, spec: OutboxRelaySpec, deadline: float) -> None:
        """Raises ``SchemaMismatch`` where a person is needed."""
        link = await Link.open(url, "schema", deadline=deadline, pooler=spec.database.pooler)
        try:
            if spec.outbox.manage_schema:
                report = await migrate(
                    link.connection, spec.outbox.table, deadline=deadline, waits=self._tell, begins=self._begins
                )
                if report.applied:
                    log.info("Schema migrated.", extra={**self._about, "applied": list(report.applied)})
            else:
                async with explained(link.connection, deadline):
                    await verify_or_refuse(link.connection, spec.outbox.table, renamed(spec.outbox.columns))
            self.ready = True
        except MailboatError:
            self.ready = False
            raise
        finally:
            self._migrating = False
            await link.close()

    def _begins(self, step: str) -> None:
        self._migrating = True
        self._tell(f"migration {step} is being applied")
