"""Types of payloads and ids, and errors with their remedy."""

from __future__ import annotations

import json
import uuid
import warnings
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id
from pydantic import BaseModel, Field

from mailboat import EmitRefused, NewEvent, emit
from mailboat.emitter.validation import checked
from mailboat_devservers.postgres import Database

ID = uuid.UUID("1663410f-853a-4bbc-98c9-dba7da5bb6ea")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class State(StrEnum):
    PAID = "paid"


class Size(Enum):
    LARGE = 3


@dataclass
class Line:
    sku: uuid.UUID
    price: Decimal


class Order(BaseModel):
    id: uuid.UUID = Field(alias="orderId")
    placed: datetime
    total: Decimal


@pytest.mark.parametrize(
    ("payload", "written"),
    [
        ({"id": ID}, {"id": str(ID)}),
        ({"at": NOON, "day": date(2026, 1, 31)}, {"at": "2026-01-31T12:00:00Z", "day": "2026-01-31"}),
        ({"total": Decimal("12.50")}, {"total": "12.50"}),
        ({"state": State.PAID, "size": Size.LARGE}, {"state": "paid", "size": 3}),
        (State.PAID, "paid"),
        ([Line(ID, Decimal("0.10"))], [{"sku": str(ID), "price": "0.10"}]),
        (
            Order(orderId=ID, placed=NOON, total=Decimal("1.0")),
            {"orderId": str(ID), "placed": "2026-01-31T12:00:00Z", "total": "1.0"},
        ),
    ],
)
def test_payloads_of_common_python_types_are_written_as_json(payload: Any, written: Any) -> None:
    assert json.loads(checked(NewEvent("x", payload)).payload or b"") == written


@pytest.mark.parametrize(
    ("value", "text"),
    [(ID, str(ID)), (7, "7"), (State.PAID, "paid"), (Size.LARGE, "3"), (date(2026, 1, 31), "2026-01-31")],
)
def test_an_id_is_stored_as_its_text(newest_outbox: Database, value: Any, text: str) -> None:
    with psycopg.connect(newest_outbox.url) as connection:
        emit(connection, State.PAID, aggregate_id=value)
        emit(connection, "order.paid", key=value)
    rows = newest_outbox.execute("select event_type, aggregate_id, key from mailboat.outbox order by id")
    assert rows == [("paid", text, text), ("order.paid", None, text)]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"payload": {"a": {1, 2}}}, "payload can't be written as JSON: set has no JSON form: convert it to a dict"),
        ({"key": True}, "key must be a string, not bool"),
        ({"aggregate_id": b"x"}, "aggregate_id must be a string, not bytes"),
    ],
)
def test_other_types_are_refused_with_the_remedy(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EmitRefused, match=f"emit: {complaint}"):
        checked(NewEvent("x", **fields))


def test_the_current_span_is_the_trace_context() -> None:
    assert checked(NewEvent("x")).traceparent is None
    with TracerProvider().get_tracer("shop").start_as_current_span("pay") as span:
        context = span.get_span_context()
        ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
        assert checked(NewEvent("x")).traceparent == f"00-{ids}-{context.trace_flags:02x}"
        given = f"00-{'1' * 32}-{'2' * 16}-00"
        assert checked(NewEvent("x", traceparent=given)).traceparent == given


async def test_a_missing_await_is_reported_by_name(newest_outbox: Database) -> None:
    async with await psycopg.AsyncConnection.connect(newest_outbox.url) as connection:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            emit(connection, "order.placed")  # type: ignore[unused-coroutine]
    assert "coroutine 'mailboat.emit' was never awaited" in [str(each.message) for each in caught]


def test_errors_of_the_database_have_a_note_with_the_remedy(newest_outbox: Database) -> None:
    newest_outbox.server.execute("create role stranger login")
    try:
        with psycopg.connect(newest_outbox.url_for("stranger")) as connection:
            with pytest.raises(psycopg.errors.InsufficientPrivilege) as denied:
                emit(connection, "x")
            assert "run: grant mailboat_writer to " in denied.value.__notes__[0]
        with psycopg.connect(newest_outbox.url) as connection:
            with pytest.raises(psycopg.errors.UndefinedTable) as missing:
                emit(connection, "x", outbox="shop.outbox")
            assert "no outbox shop.outbox in this database. Create it: `mailboat migrate`" in missing.value.__notes__[0]
    finally:
        newest_outbox.server.execute("drop role stranger")
