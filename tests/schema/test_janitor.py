"""What the upkeep of an outbox tells while it can't be done (G10): how long writers still have, and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psycopg

from mailboat.outbox.layout import Layout
from mailboat.runtime.janitor import Janitor
from mailboat_harbor.postgres import Database
from mailboat_spec import Pooler, Retention
from support.wait import await_until

OUTBOX = "mailboat.outbox"


@asynccontextmanager
async def at_work(database: Database) -> AsyncIterator[Janitor]:
    janitor = Janitor(lambda: database.url, Layout(OUTBOX), Retention(), Pooler.AUTO)
    rounds = asyncio.create_task(janitor.run())
    try:
        yield janitor
    finally:
        rounds.cancel()
        with suppress(asyncio.CancelledError):
            await rounds


async def test_how_many_days_are_left_is_told_where_no_more_can_be_made(outbox: Database) -> None:
    with psycopg.connect(outbox.url, autocommit=True) as owner:
        later = owner.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'mailboat.outbox'::regclass"
            " order by 1 offset 4"
        ).fetchall()
        for (name,) in later:  # they are in the way of those that would be made
            owner.execute(f"alter table mailboat.outbox detach partition {name}")
    async with at_work(outbox) as janitor:
        await await_until(lambda: janitor.upkeep.error is not None, timeout=20, what="the upkeep to fail")
        assert janitor.upkeep.days_ahead is not None
        assert 1 < janitor.upkeep.days_ahead <= 3
        assert "is in the way" in (janitor.upkeep.error or "")


async def test_upkeep_that_is_well_has_nothing_to_tell(outbox: Database) -> None:
    async with at_work(outbox) as janitor:
        await await_until(lambda: (janitor.upkeep.days_ahead or 0) > 29, timeout=20, what="a round")
        assert janitor.upkeep.error is None
