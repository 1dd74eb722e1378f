"""A consumer without a database: the production engine and dispatch on an outbox in memory.

The rules are those of ``mailboat.pull``: effects and progress in one transaction, parked keys, attempts, dead letters.
Time does not pass: back-offs end at once, ``RetryLater`` ends with ``advance``.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from mailboat.cloudevents import is_json
from mailboat.consumer import Consumer, Event
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handler_outcomes import Refusal
from mailboat.consumer.handlers import TransactionKind
from mailboat.consumer.pull_source import ConsumerPoint, Pace, PullSource
from mailboat.emitter.drivers import Handle
from mailboat.emitter.validation import NewEvent, OutboxRow, checked
from mailboat.testing.emitted_events import EmittedEvent, of_row

_COLUMNS: Final = len(OutboxRow._fields)
_DEAD_LETTER: Final = "mailboat.dead-letter"
_LARGEST_EMBEDDED: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class DeadEvent:
    """An event that was given up on."""

    event: Event
    reason: str
    error: str
    attempts: int


class RecordingTransaction:
    """Transaction for handlers that records every statement, and the events written by ``mailboat.emit``."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, Any]] = []
        self.emitted: list[EmittedEvent] = []

    def execute(self, statement: Any, parameters: Any = None) -> None:
        self.statements.append((str(statement), parameters))

    def mailboat_handle(self) -> Handle:
        """Return the handle through which ``emit`` writes (see ``mailboat.emitter.drivers``)."""
        return Handle("format", False, self._insert)

    def _insert(self, statement: str, values: Sequence[Any]) -> None:
        rows = (OutboxRow(*values[start : start + _COLUMNS]) for start in range(0, len(values), _COLUMNS))
        self.emitted += [of_row(row) for row in rows]


class AsyncRecordingTransaction(RecordingTransaction):
    """Recording transaction for asynchronous handlers."""

    async def execute(self, statement: Any, parameters: Any = None) -> None:  # type: ignore[override]
        super().execute(statement, parameters)

    def mailboat_handle(self) -> Handle:
        async def insert(statement: str, values: Sequence[Any]) -> None:
            self._insert(statement, values)

        return Handle("format", True, insert)


class _Crash(BaseException):
    """Simulated crash of the consumer's process."""


@dataclass(slots=True)
class _Waiting:
    event: Event
    attempts: int = 0
    begun: int = 0
    due: datetime | None = None


@dataclass(slots=True)
class Bench:
    """An outbox in memory with one consumer."""

    dispatcher: Dispatcher
    transaction: Callable[[], Any]
    max_attempts: int
    batch_size: int
    emit_dead_letters: bool = False
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    handled_events: list[Event] = field(default_factory=list)
    dead_letters: list[DeadEvent] = field(default_factory=list)
    emitted: list[EmittedEvent] = field(default_factory=list)
    statements: list[tuple[str, Any]] = field(default_factory=list)
    _waiting: list[_Waiting] = field(default_factory=list)
    _taken: list[_Waiting] = field(default_factory=list)
    _open: Any = None
    _crash_at: ConsumerPoint | None = None
    _crashes: int = 0
    _dead: int = 0

    @property
    def handled(self) -> list[str]:
        """Types of the events whose effects are committed, in order."""
        return [event.type for event in self.handled_events]

    @property
    def parked(self) -> list[Event]:
        """Events that wait for a later time, or behind an event of their key."""
        return [each.event for each in self._waiting]

    async def send(
        self,
        type: str,
        payload: Any = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        content_type: str | None = None,
    ) -> Event:
        """Emit one event and run the consumer until nothing is due."""
        row = checked(NewEvent(type, payload, key=key, headers=headers, tags=tags, content_type=content_type))
        event = Event(
            id=UUID(row.event_id),
            type=row.event_type,
            key=row.key,
            payload=row.payload,
            content_type=row.content_type,
            headers=json.loads(row.headers) if row.headers else {},
            tags=tuple(tags),
            created_at=self.now,
        )
        self._waiting.append(_Waiting(event))
        await self.run()
        return event

    async def advance(self, *, seconds: float = 0, minutes: float = 0, hours: float = 0) -> None:
        """Advance the clock and run the consumer on the events due by then."""
        self.now += timedelta(seconds=seconds, minutes=minutes, hours=hours)
        await self.run()

    async def replay(self) -> None:
        """Replay all dead letters at the heads of their keys, as ``mailboat dlq replay`` does."""
        dead, self.dead_letters = self.dead_letters, []
        self._waiting[:0] = [_Waiting(replace(each.event, replay=True)) for each in dead]
        await self.run()

    @contextmanager
    def crash(self, point: str, times: int = 1) -> Iterator[None]:
        """Crash and restart the consumer when it next passes the point (a value of ``ConsumerPoint``)."""
        self._crash_at, self._crashes = ConsumerPoint(point), times
        try:
            yield
        finally:
            self._crashes = 0

    async def run(self) -> None:
        """Run the consumer until nothing is due."""
        while self._due():
            stop = asyncio.Event()
            session = _MemorySession(self, stop)

            async def open_session(session: _MemorySession = session) -> _MemorySession:
                return session

            source = PullSource(
                self.dispatcher, open_session, workers=1, pace=Pace(first=0, longest=0), passing=self._passing
            )
            try:
                await source.run(stop)
            except _Crash:
                self._lose()

    def _passing(self, point: ConsumerPoint) -> None:
        if point is self._crash_at and self._crashes > 0:
            self._crashes -= 1
            raise _Crash

    def _due(self) -> list[_Waiting]:
        """Return the events of the next pull: no event passes an earlier waiting event of its key."""
        found: list[_Waiting] = []
        held: set[str] = set()
        for each in self._waiting:
            later = each.due is not None and each.due > self.now
            if later or (each.event.key is not None and each.event.key in held):
                if each.event.key is not None:
                    held.add(each.event.key)
                continue
            if each.attempts or each.begun:  # an event with earlier attempts is delivered alone
                return found or [each]
            found.append(each)
        return found[: self.batch_size]

    def _lose(self) -> None:
        """Discard the open transaction. Begun deliveries still count."""
        for each in self._taken:
            each.begun += 1
        if len(self._taken) == 1:
            (each,) = self._taken
            if each in self._waiting and each.attempts + each.begun >= self.max_attempts:
                self._give_up(each, "ConsumerDied", "consumers died with it in hand", each.attempts + each.begun)
        self._taken, self._open = [], None

    def _give_up(self, each: _Waiting, reason: str, error: str, attempts: int) -> None:
        self._waiting.remove(each)
        self.dead_letters.append(DeadEvent(each.event, reason, error, attempts))
        self._dead += 1
        if self.emit_dead_letters and each.event.type != _DEAD_LETTER:
            self.emitted.append(self._dead_letter_event(self.dead_letters[-1]))

    def _dead_letter_event(self, letter: DeadEvent) -> EmittedEvent:
        """Return the event that ``sink.pull.emitDeadLetters`` emits. Its document is that of the SQL function
        ``mailboat.dead_letter_document``."""
        event, consumer = letter.event, self.dispatcher.name
        row = checked(
            NewEvent(
                _DEAD_LETTER,
                {
                    "originalEvent": _original(event),
                    "reason": letter.reason,
                    "failedAt": self.now.isoformat(),
                    "error": letter.error,
                    "attempts": letter.attempts,
                    "consumer": consumer,
                    "source": {
                        "outbox": "mailboat.outbox",
                        "position": event.position,
                        "partition": event.partition,
                        "deadLetter": self._dead,
                    },
                },
                key=event.key,
                aggregate_type=event.aggregate_type,
                aggregate_id=event.aggregate_id,
                tags=(f"dead-letter-of={consumer}", f"reason={letter.reason}"),
            )
        )
        return of_row(row)


def _original(event: Event) -> dict[str, Any]:
    """Return the event as part of a dead letter's document."""
    payload = event.payload if len(event.payload or b"") <= _LARGEST_EMBEDDED else None
    try:
        embedded = json.loads(payload) if payload is not None and is_json(event.content_type) else None
    except ValueError:
        embedded = None
    return {
        "id": str(event.id),
        "type": event.type,
        "key": event.key,
        "aggregateType": event.aggregate_type,
        "aggregateId": event.aggregate_id,
        "createdAt": event.created_at.isoformat(),
        "contentType": event.content_type,
        "headers": dict(event.headers) or None,
        "tags": list(event.tags),
        "traceparent": event.traceparent,
        "payload": embedded,
        "payloadBase64": None if embedded is not None or payload is None else b64encode(payload).decode(),
        "payloadBytes": None if event.payload is None else len(event.payload),
    }


class _MemorySession:
    """One connection to a bench."""

    def __init__(self, box: Bench, stop: asyncio.Event) -> None:
        self._box = box
        self._stop = stop

    def transaction(self, kind: TransactionKind) -> Any:
        if self._box._open is None:
            self._box._open = self._box.transaction()
        return self._box._open

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return function()  # no thread, for complete tracebacks and debuggers

    async def pull(self) -> list[Event]:
        self._box._taken = self._box._due()
        if not self._box._taken:
            self._stop.set()
        return [
            replace(each.event, attempt=each.attempts + each.begun + 1, redeliveries=each.begun)
            for each in self._box._taken
        ]

    async def commit(self) -> None:
        box = self._box
        box.handled_events += [each.event for each in box._taken]
        for each in box._taken:
            box._waiting.remove(each)
        if box._open is not None:
            box.emitted += getattr(box._open, "emitted", [])
            box.statements += getattr(box._open, "statements", [])
        box._taken, box._open = [], None

    async def rollback(self) -> None:
        self._box._taken, self._box._open = [], None

    async def refuse(self, event_id: UUID, refusal: Refusal) -> str:
        box = self._box
        (each,) = [each for each in box._waiting if each.event.id == event_id]
        each.attempts += refusal.counted
        if refusal.final or each.attempts >= box.max_attempts:
            box._give_up(each, refusal.reason, refusal.error, each.attempts)
            return "DeadLettered"
        each.due = None if refusal.retry_in is None else box.now + refusal.retry_in
        return "Parked"

    def is_lost(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing: there is no connection."""


@asynccontextmanager
async def bench(
    consumer: Consumer,
    *,
    transaction: Callable[[], Any] | None = None,
    max_attempts: int = 4,
    batch_size: int = 100,
    emit_dead_letters: bool = False,
) -> AsyncIterator[Bench]:
    """Create a bench for the consumer's handlers. ``transaction`` creates the open transaction passed to them.

    ``emit_dead_letters``: as ``sink.pull.emitDeadLetters``, dead letters are among the emitted events.
    """
    kind = consumer.dispatcher.transaction_kind()
    default = AsyncRecordingTransaction if kind is not None and kind.is_async else RecordingTransaction
    dispatcher = Dispatcher(consumer.name, list(consumer.dispatcher.handlers), consumer.dispatcher.no_handler)
    yield Bench(dispatcher, transaction or default, max_attempts, batch_size, emit_dead_letters)


def some_event(type: str, payload: Any = None, **fields: Any) -> Event:
    """Create an event for a direct call of a handler."""
    content = payload if isinstance(payload, bytes) or payload is None else json.dumps(payload).encode()
    return Event(**{"id": uuid4(), "type": type, "payload": content, "created_at": datetime.now(UTC), **fields})
