"""The commands of the CLI for parked events and dead letters, as functions."""

from __future__ import annotations

from typing import Any

from mailboat.store.admin import parked_events
from mailboat.store.admin.dead_letters import candidates, plan
from mailboat.store.admin.dead_letters import replay as replay_dead
from mailboat.store.admin.selection import Match
from mailboat_devservers.postgres import Database
from support.databases import OUTBOX, connected


async def replay(outbox: Database, **match: Any) -> int:
    """`mailboat dlq replay`; return the number of dead letters."""
    async with connected(outbox.url, "people") as link:
        found = await candidates(link, Match(OUTBOX, **match), replayed=False, limit=None)
        return await replay_dead(link, OUTBOX, plan(found).replay, again=False)


async def retry(outbox: Database) -> int:
    """`mailboat parked retry --all`; return the number of keys."""
    async with connected(outbox.url, "people") as link:
        found = await parked_events.list_parked(link, Match(OUTBOX), behind=True, limit=None)
        return (await parked_events.retry(link, OUTBOX, found)).heads


async def drop(outbox: Database) -> int:
    """`mailboat parked drop --all`; return the number of events."""
    async with connected(outbox.url, "people") as link:
        found = await parked_events.list_parked(link, Match(OUTBOX), behind=True, limit=None)
        return await parked_events.drop(link, OUTBOX, found)
