"""A small consumer as a process of its own, for tests that kill it.

    python -m support.claims_main '{"mode": "redis", "redis": ..., "postgres": ..., "events": [...], "die_at":
    "handled"}'

It stands in for a broker: events are in order, the offset of the first one that is not finished is stored in the table
``offsets`` after every tenth event, and a restarted process begins there. The effect is a row of ``effects_of_main``.
Modes:

| mode | idempotency |
|---|---|
| ``none`` | none |
| ``bare`` | ``SET NX`` before the handler |
| ``redis`` | RedisClaims |
| ``inbox`` | InboxClaims and InboxExecution |
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import redis

from mailboat.consumer.broker.protocol import Claim, Claimed, ClaimStore, Finished
from mailboat.consumer.claims.inbox import InboxClaims, InboxExecution
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.received import Event
from mailboat.consumer.transactions import PsycopgAsync, Wanted

COMMIT_EVERY = 10
TABLES = """
create table if not exists effects_of_main (event_id uuid not null, attempt integer);
create table if not exists offsets (consumer text primary key, finished integer not null)
"""
OFFSET = "insert into offsets values (%s, %s) on conflict (consumer) do update set finished = excluded.finished"


def passing(orders: dict[str, Any]) -> Callable[[str], None]:
    def passed(point: str) -> None:
        if point == orders.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)

    return passed


class Loop:
    """Handles events one after the other."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders = orders
        self.consumer = orders.get("consumer", "main")
        self.passed = passing(orders)
        self.database = psycopg.connect(orders["postgres"], autocommit=True)
        self.database.execute(TABLES)

    async def run(self) -> None:
        found = self.database.execute("select finished from offsets where consumer = %s", [self.consumer]).fetchone()
        events = self.orders["events"]
        handle = {"none": self.plain, "bare": self.bare}.get(self.orders["mode"], self.claimed)
        if handle == self.claimed:
            await self.open_store()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for offset in range(found[0] if found else 0, len(events)):
            await handle(events[offset])
            if (offset + 1) % COMMIT_EVERY == 0 or offset + 1 == len(events):
                self.database.execute(OFFSET, [self.consumer, offset + 1])
        if handle == self.claimed:
            await self.store.close()
            await self.execution.close()

    async def effect(self, event_id: str, attempt: int | None, database: Any) -> None:
        await asyncio.sleep(self.orders.get("handler_takes", 0) / 2)
        written = database.execute("insert into effects_of_main values (%s, %s)", [event_id, attempt])
        if database is not self.database:
            await written
        await asyncio.sleep(self.orders.get("handler_takes", 0) / 2)

    async def plain(self, event_id: str) -> None:
        await self.effect(event_id, None, self.database)

    async def bare(self, event_id: str) -> None:
        client = redis.Redis.from_url(self.orders["redis"])
        if client.set(f"pf:evt:processed:{self.consumer}:{event_id}", "1", nx=True, ex=3600):
            await self.effect(event_id, None, self.database)
        client.close()

    async def open_store(self) -> None:
        instance: dict[str, Any] = {"instance": "container"}  # the same after a restart: claims are taken over at once
        wanted = Wanted(self.consumer, None, None)
        self.execution = InboxExecution(
            lambda: PsycopgAsync.open(self.orders["postgres"], wanted), consumer=self.consumer
        )
        self.store: ClaimStore = (
            InboxClaims(self.orders["postgres"], consumer=self.consumer, **instance)
            if self.orders["mode"] == "inbox"
            else RedisClaims(self.orders["redis"], consumer=self.consumer, prefix="contrast", **instance)
        )
        await self.store.open()

    async def claimed(self, event_id: str) -> None:
        (answer,) = await self.store.claim([Claim(event_id)])
        assert isinstance(answer, Claimed | Finished), answer
        if isinstance(answer, Finished):
            return
        self.passed("claimed")

        async def dispatch(event: Event, scope: Any) -> None:
            self.passed("marked")
            await self.effect(event_id, answer.attempt, scope._connection)
            self.passed("handled")

        if self.orders["mode"] == "inbox":
            await self.execution.run(Event(id=UUID(event_id), type="t", created_at=datetime.now(UTC)), dispatch)
            self.passed("committed")
        else:
            await self.effect(event_id, answer.attempt, self.database)
        await self.store.done([event_id])
        self.passed("done")


if __name__ == "__main__":
    asyncio.run(Loop(json.loads(sys.argv[1])).run())
