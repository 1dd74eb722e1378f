"""Registration of handlers: arguments by annotation, payloads by type, and an early error for invalid handlers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from sqlalchemy.orm import Session

from mailboat.consumer import Event, handler_spans
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handler_outcomes import LONGEST_ERROR, CannotDecode, bounded_traceback
from mailboat.consumer.handler_spans import handler_span
from mailboat.consumer.handlers import handler
from mailboat.consumer.payloads import decoder
from mailboat.errors import ConfigError


class Model(BaseModel):
    number: int


@dataclass
class Record:
    number: int


def event(payload: bytes | None = b'{"number": 1}', **fields: Any) -> Event:
    return Event(id=UUID(int=1), type="order.placed", payload=payload, created_at=datetime.now(UTC), **fields)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Model, Model(number=1)),
        (Record, Record(1)),
        (dict[str, int], {"number": 1}),
        (dict, {"number": 1}),
        (Any, {"number": 1}),
        (bytes, b'{"number": 1}'),
        (str, '{"number": 1}'),
        (Model | None, Model(number=1)),
    ],
)
def test_a_payload_has_the_annotated_type(annotation: Any, value: object) -> None:
    assert decoder(annotation)(event()) == value


def test_a_payload_of_another_type_is_reported_without_its_values() -> None:
    with pytest.raises(CannotDecode, match="Model: number: Input should be a valid integer") as refusal:
        decoder(Model)(event(b'{"number": "secret"}'))
    assert "secret" not in str(refusal.value)
    with pytest.raises(CannotDecode, match="tombstone"):
        decoder(Model)(event(None))
    assert decoder(Model | None)(event(None)) is None
    with pytest.raises(CannotDecode, match="not JSON"):
        decoder(dict)(event(b"{"))


def two_payloads(one: Model, other: Record) -> None: ...


def no_annotation(order) -> None: ...


def a_list(events: list[Event]) -> None: ...


async def sync_transaction(order: Model, tx: psycopg.Connection[Any]) -> None: ...


def one_event(event: Event, order: Model) -> None: ...


@pytest.mark.parametrize(
    ("function", "batch", "complaint"),
    [
        (two_payloads, False, "other and one would both get the payload"),
        (no_annotation, False, "order has no annotation"),
        (a_list, False, "a single handler gets Event"),
        (one_event, True, r"a batch handler gets list\[Event\]"),
        (sync_transaction, False, "is async, and psycopg.Connection is not"),
    ],
)
def test_a_handler_that_can_not_be_called_is_refused(function: Callable[..., Any], batch: bool, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        handler("*", function, batch=batch)


def test_handlers_of_one_consumer_share_one_type_of_transaction() -> None:
    def with_psycopg(tx: psycopg.Connection[Any]) -> None: ...

    def with_session(tx: Session) -> None: ...

    dispatcher = Dispatcher("view")
    dispatcher.add(handler("*", with_psycopg))
    dispatcher.add(handler("*", with_session))
    with pytest.raises(ConfigError, match=r"psycopg.Connection, sqlalchemy.orm.Session"):
        dispatcher.transaction_kind()


def test_a_traceback_is_bounded_and_keeps_its_end() -> None:
    text = bounded_traceback(ValueError("x" * 2 * LONGEST_ERROR + "the end"))
    assert len(text) < LONGEST_ERROR + 10
    assert text.endswith("the end")


def test_a_span_is_linked_to_those_that_emitted_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(handler_spans, "_provider", handler_spans._Provider())  # other tests found none a moment ago
    with handler_span("shop/view", "project", event(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.name == "process shop/view"
    assert [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links] == [
        f"{'a' * 32}-{'b' * 16}"
    ]


def test_an_application_that_only_emits_imports_nothing_of_the_kit() -> None:
    heavy = (
        "sorted({name.partition('.')[0] for name in sys.modules} & {'psycopg', 'pydantic', 'sqlalchemy', 'aiohttp'})"
    )
    program = f"import sys, mailboat; print({heavy}); mailboat.Consumer; print('pydantic' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["[]", "True"]
