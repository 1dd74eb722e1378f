"""Dispatcher: runs the handlers of a batch. Depends on events, handlers and outcomes, not on a source.

A batch contains the events that a source handles together: one event, or all events of one transaction. An event is
handled only if all its handlers succeed: an error in one handler is the event's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from mailboat.consumer.handler_outcomes import HasNoHandler, Ignore, Refusal, refusal_for
from mailboat.consumer.handler_spans import handler_span, is_traced
from mailboat.consumer.handlers import Handler, TransactionKind
from mailboat.consumer.received_event import Event
from mailboat.errors import ConfigError
from mailboat_spec import NoHandler


class Scope(Protocol):
    """Execution scope of handlers: the transaction passed to them, and the thread of synchronous handlers."""

    def transaction(self, kind: TransactionKind) -> Any: ...

    async def in_thread(self, function: Callable[[], Any]) -> Any: ...


class NotHandled(Exception):
    """An event of a batch was not handled. ``event`` is None if the failed event is unknown."""

    def __init__(self, event: Event | None, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.event = event
        self.refusal = refusal


@dataclass(slots=True)
class Counts:
    """Counters since the process started."""

    handled: int = 0
    ignored: int = 0
    refused: int = 0
    redelivered: int = 0
    last_error: str | None = None


@dataclass(slots=True)
class Dispatcher:
    """The handlers of one consumer."""

    name: str
    handlers: list[Handler] = field(default_factory=list)
    no_handler: NoHandler = NoHandler.DEAD_LETTER
    counts: Counts = field(default_factory=Counts)
    _by_type: dict[str, tuple[Handler, ...]] = field(default_factory=dict)

    def add(self, new: Handler) -> None:
        self.handlers.append(new)
        self._by_type.clear()

    def transaction_kind(self) -> TransactionKind | None:
        """Return the transaction kind of the handlers. Sessions and connections of one vendor can be combined."""
        kinds = {each.transaction_kind for each in self.handlers if each.transaction_kind is not None}
        if len({(kind.vendor, kind.is_async) for kind in kinds}) > 1:
            names = ", ".join(sorted(kind.value for kind in kinds))
            raise ConfigError(f"consumer {self.name}: its handlers want {names}: one transaction can't be all of these")
        return min(kinds, key=lambda kind: kind.value, default=None)

    def handlers_for(self, event_type: str) -> tuple[Handler, ...]:
        found = self._by_type.get(event_type)
        if found is None:
            found = tuple(each for each in self.handlers if each.pattern.matches(event_type))
            if len(self._by_type) < 10_000:
                self._by_type[event_type] = found
        return found

    async def handle(self, batch: Sequence[Event], scope: Scope) -> None:
        """Run all handlers for the batch, in order. If it raises ``NotHandled``, the caller must roll back."""
        calls = [call for event in batch for call in self._calls(event)]
        if any(each.is_batch for each in self.handlers):
            calls += [call for group in self._groups(batch) for call in self._batch_calls(group)]
        if any(call.handler.is_async for call in calls):
            ignored = sum([await self._await(call, scope) for call in calls])
        else:  # one thread switch for all calls
            ignored = await scope.in_thread(lambda: sum(self._run(call, scope) for call in calls))
        self.counts.handled += len(batch)
        self.counts.ignored += ignored
        self.counts.redelivered += sum(1 for event in batch if event.redeliveries or event.attempt > 1)

    async def handle_one(self, event: Event, scope: Scope) -> bool:
        """Run all handlers for one event and return True; the same as ``handle`` with a batch of one, and cheaper.
        Batch handlers are for sources that have batches, and do not run."""
        found = self.handlers_for(event.type)
        if len(found) == 1 and found[0].is_async and not found[0].is_batch and not is_traced():
            self.counts.ignored += await self._await_one(found[0], event, scope)
        else:
            calls = self._calls(event)
            if any(call.handler.is_async for call in calls):
                self.counts.ignored += sum([await self._await(call, scope) for call in calls])
            elif calls:  # one thread switch for all calls
                self.counts.ignored += await scope.in_thread(lambda: sum(self._run(call, scope) for call in calls))
        self.counts.handled += 1
        if event.redeliveries or event.attempt > 1:
            self.counts.redelivered += 1
        return True

    async def _await_one(self, only: Handler, event: Event, scope: Scope) -> int:
        """The same as ``_await`` for the usual case: one asynchronous handler, no tracing."""
        try:
            payload = None if only.decode is None else only.decode(event)
        except Exception as error:
            raise NotHandled(event, refusal_for(error)) from error
        try:
            kind = only.transaction_kind
            transaction = None if kind is None else scope.transaction(kind)
            await only.function(**only.arguments(event, payload, transaction))
        except Ignore:
            return 1
        except Exception as error:
            raise self._failed(_Call(only, event, payload, event), error) from error
        return 0

    def _calls(self, event: Event) -> list[_Call]:
        """Return the handler calls of an event. Decodes before any handler runs, so that no work is rolled back because
        another event can't be decoded."""
        found = self.handlers_for(event.type)
        if not found and self.no_handler is NoHandler.DEAD_LETTER:
            raise NotHandled(event, refusal_for(HasNoHandler(f"no handler is registered for type {event.type}")))
        try:
            return [
                _Call(each, event, each.decode(event) if each.decode else None, event)
                for each in found
                if not each.is_batch
            ]
        except Exception as error:
            raise NotHandled(event, refusal_for(error)) from error

    def _batch_calls(self, group: Sequence[Event]) -> list[_Call]:
        """Return the batch handler calls of a group. If one fails, the group fails as a whole; without a group, the
        failed event is unknown unless there is only one."""
        calls = []
        for each in self.handlers:
            matching = [event for event in group if each.is_batch and each.pattern.matches(event.type)]
            if matching:
                blamed = matching[0] if len(matching) == 1 or matching[0].group is not None else None
                calls.append(_Call(each, matching, None, blamed))
        return calls

    @staticmethod
    def _groups(batch: Sequence[Event]) -> list[list[Event]]:
        """Split a batch into groups. Consecutive events without a group form one list, as the source delivered them."""
        return [list(group) for _, group in groupby(batch, key=lambda event: event.group)]

    async def _await(self, call: _Call, scope: Scope) -> int:
        """Run one call and return 1 if the handler raised ``Ignore``, else 0."""
        if not call.handler.is_async:
            ignored: int = await scope.in_thread(lambda: self._run(call, scope))
            return ignored
        try:
            with handler_span(self.name, call.handler.name, call.events):
                await call.handler.function(**call.arguments(scope))
        except Ignore:
            return 1
        except Exception as error:
            raise self._failed(call, error) from error
        return 0

    def _run(self, call: _Call, scope: Scope) -> int:
        try:
            with handler_span(self.name, call.handler.name, call.events):
                call.handler.function(**call.arguments(scope))
        except Ignore:
            return 1
        except Exception as error:
            raise self._failed(call, error) from error
        return 0

    def _failed(self, call: _Call, error: Exception) -> NotHandled:
        self.counts.last_error = f"{call.handler.name}: {type(error).__name__}: {error}"[:500]
        return NotHandled(call.blamed, refusal_for(error))


@dataclass(frozen=True, slots=True)
class _Call:
    """A handler and its arguments. ``blamed`` is the event to refuse if the handler fails."""

    handler: Handler
    events: Event | Sequence[Event]
    payload: Any
    blamed: Event | None

    def arguments(self, scope: Scope) -> dict[str, Any]:
        kind = self.handler.transaction_kind
        return self.handler.arguments(self.events, self.payload, None if kind is None else scope.transaction(kind))
