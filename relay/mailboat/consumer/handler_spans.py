"""One OpenTelemetry span per handler call, linked to the spans that emitted the events. Optional dependency."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

from mailboat.consumer.received_event import Event

_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()
_LOOKUP_EVERY: Final = 1.0


class _Provider:
    """OpenTelemetry's tracer provider. Asking for it reads the environment, so a missing one is looked for once a
    second."""

    def __init__(self) -> None:
        self._found: Any = None
        self._next_lookup = float("-inf")

    def find(self) -> Any:
        """Return the provider; None if no SDK is configured: a span would not be exported."""
        if self._found is not None or (now := time.monotonic()) < self._next_lookup:
            return self._found
        self._next_lookup = now + _LOOKUP_EVERY
        api = _api()
        if api is not None and not isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
            self._found = provider
        return self._found


_provider: Final = _Provider()


def is_traced() -> bool:
    """Return whether handler calls have spans."""
    return _provider.find() is not None


def handler_span(consumer: str, handler: str, events: Event | Sequence[Event]) -> AbstractContextManager[Any]:
    """Return a span around a handler call, with the events' trace contexts as links."""
    provider = _provider.find()
    if provider is None:
        return _NOTHING
    api = _api()
    batch = [events] if isinstance(events, Event) else list(events)
    links = [link for event in batch if (link := _link(api, event.traceparent)) is not None]
    attributes = {
        "messaging.system": "mailboat",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": consumer,
        "messaging.batch.message_count": len(batch),
        "code.function.name": handler,
    }
    if len(batch) == 1:
        attributes["messaging.message.id"] = str(batch[0].id)
    tracer = provider.get_tracer("mailboat.consumer")
    span: AbstractContextManager[Any] = tracer.start_as_current_span(
        f"process {consumer}", kind=api.SpanKind.CONSUMER, links=links, attributes=attributes
    )
    return span


@cache
def _api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


def _link(api: Any, traceparent: str | None) -> Any:
    """Return a link for a W3C trace context, which ``emit`` has validated."""
    if traceparent is None:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")[:4]
    context = api.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=api.TraceFlags(int(flags, 16))
    )
    return api.Link(context)
