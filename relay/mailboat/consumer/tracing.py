"""One OpenTelemetry span per handler call, linked to the spans that emitted the events. Optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

from mailboat.consumer.received import Event

_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()


def current_tracer() -> Any:
    """Return OpenTelemetry's tracer, or None if no SDK is configured: spans would not be exported."""
    api = _api()
    if api is None or isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    return provider.get_tracer("mailboat.consumer")


def handling(tracer: Any, consumer: str, handler: str, events: Event | Sequence[Event]) -> AbstractContextManager[Any]:
    """Return a span around a handler call, with the events' trace contexts as links. Without a tracer, nothing."""
    if tracer is None:
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
