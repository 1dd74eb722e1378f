"""Parts of a broker consumer for tests: a source, a claim store and dead letters in memory, and records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from mailboat.consumer.broker.engine import BrokerEngine, EngineSettings
from mailboat.consumer.broker.execution import PlainExecution
from mailboat.consumer.broker.interfaces import (
    Busy,
    Claim,
    Claimed,
    ClaimReply,
    ClaimsUnavailable,
    DeadLettersUnavailable,
    DeadRecord,
    FailedAttempt,
    Finished,
    Original,
    Receiver,
    Record,
    SourceState,
)
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import handler
from mailboat.consumer.received_event import Event
from mailboat.delivery.backoff import Backoff

NAME = "shop/billing"
QUICK = Backoff(initial=0.01, factor=1, ceiling=0.01, jitter=0)


def record(key: str | None, number: int, *, partition: int = 0, event_type: str = "x", **fields: Any) -> Record:
    original = Original(
        topic="orders", partition=partition, offset=number, timestamp=None, headers=(),
        key=None if key is None else key.encode(),
        value=json.dumps({"key": key, "number": number}).encode(),
    )  # fmt: skip
    event = Event(id=uuid4(), type=event_type, key=key, payload=original.value, created_at=datetime.now(UTC), **fields)
    return Record(event=event, original=original, partition=partition)


class FakeSource:
    """Source with records from the test."""

    def __init__(self) -> None:
        self.settled: list[Record] = []
        self.released: list[Record] = []
        self.receiver: Receiver | None = None
        self.partitions: set[int] = set()

    async def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def feed(self, records: Iterable[Record]) -> None:
        assert self.receiver is not None
        records = list(records)
        self.partitions |= {each.partition for each in records}
        self.receiver.take(records)

    def settle(self, record: Record) -> None:
        self.settled.append(record)

    def release(self, record: Record) -> None:
        self.released.append(record)

    def state(self) -> SourceState:
        return SourceState(connected=self.receiver is not None)

    async def stop(self) -> None:
        if self.receiver is not None:
            await self.receiver.revoke(self.partitions, 0.2)


class FakeClaims:
    """Claim store in memory. ``away`` makes it unavailable."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[str, int]] = {}
        self.died: set[str] = set()
        self.away = False
        self.calls: list[tuple[str, int]] = []

    def _call(self, name: str, size: int) -> None:
        if self.away:
            raise ClaimsUnavailable("the test took it away")
        self.calls.append((name, size))

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]:
        await asyncio.sleep(0)
        self._call("claim", len(claims))
        return [self._reply(each) for each in claims]

    def _reply(self, claim: Claim) -> ClaimReply:
        state, attempts = self.states.get(claim.event_id, ("new", 0))
        if state == "done" or (state == "dead" and not claim.replay):
            return Finished(dead=state == "dead")
        if state == "other":
            return Busy(0.01)
        attempts = 1 if state == "dead" else attempts + 1
        self.states[claim.event_id] = ("ours", attempts)
        if state == "died":
            self.died.add(claim.event_id)
        return Claimed(attempts, redeliveries=claim.event_id in self.died)

    async def _set(self, state: str, ids: Sequence[str]) -> list[bool]:
        self._call(state, len(ids))
        kept = [self.states[each][0] == "ours" for each in ids]
        self.states.update({each: (state, self.states[each][1]) for each in ids})
        return kept

    async def done(self, event_ids: Sequence[str]) -> list[bool]:
        return await self._set("done", event_ids)

    async def dead(self, event_ids: Sequence[str]) -> list[bool]:
        return await self._set("dead", event_ids)

    async def fail(self, failures: Sequence[FailedAttempt]) -> list[bool]:
        kept = await self._set("failed", [each.event_id for each in failures])
        for each in failures:
            if not each.counted:
                self.states[each.event_id] = ("failed", self.states[each.event_id][1] - 1)
        return kept

    async def release(self, event_ids: Sequence[str]) -> None:
        event_ids = [each for each in event_ids if self.states.get(each, ("", 0))[0] == "ours"]
        await self._set("failed", event_ids)
        self.states.update({each: ("failed", self.states[each][1] - 1) for each in event_ids})


class FakeDeadLetters:
    """A dead-letter topic in memory. ``away`` makes it unavailable."""

    def __init__(self) -> None:
        self.letters: list[DeadRecord] = []
        self.away = False

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def write(self, letter: DeadRecord) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise DeadLettersUnavailable("the test took it away")
        self.letters.append(letter)


@dataclass
class Engine:
    """An engine with its parts."""

    engine: BrokerEngine
    source: Any
    dispatcher: Dispatcher
    claims: Any
    dead: Any
    stop: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def running(
    function: Callable[..., Any],
    *,
    pattern: str = "x*",
    claims: Any = None,
    source: Any = None,
    dead: Any = None,
    **settings: Any,
) -> AsyncIterator[Engine]:
    """Run an engine with one handler."""
    dispatcher = Dispatcher(NAME)
    dispatcher.add(handler(pattern, function))
    dead = dead or FakeDeadLetters()
    source = source or FakeSource()
    chosen = EngineSettings(consumer=NAME, **{"backoff": QUICK, "concurrency": 8, **settings})
    engine = BrokerEngine(dispatcher, source, claims, PlainExecution(8), dead, chosen)
    parts = Engine(engine, source, dispatcher, claims, dead)
    task = asyncio.create_task(engine.run(parts.stop))
    try:
        while isinstance(source, FakeSource) and source.receiver is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        yield parts
    finally:
        parts.stop.set()
        await task
