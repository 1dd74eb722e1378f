"""`mailboat.testing`: consumers in memory, and the events that a transaction emitted."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy

import mailboat
from mailboat import Consumer, Event, Refuse, RetryLater, emit
from mailboat.consumer.pull_source import ConsumerPoint
from mailboat.testing import assert_emitted, bench, emitted
from mailboat_devservers.postgres import Database
from support.wait import await_until

pytest_plugins = ["mailboat.testing.fixtures"]


@pytest.fixture
def billing() -> Consumer:
    consumer = Consumer("shop/billing")
    closed: list[bool] = [True]

    @consumer.on("order.placed")
    async def invoice(order: dict[str, Any], event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        if order["total"] < 0:
            raise Refuse("negative")
        if order["total"] == 0 and closed.pop():
            closed.append(False)
            raise RetryLater("bank closed", minutes=5)
        if order["total"] == 13:
            raise LookupError("thirteen")
        await tx.execute("insert into invoices ...", [order["total"]])
        await emit(tx, "invoice.written", {"order": event.key}, key=event.key, tags=["a b"])

    return consumer


async def test_handlers_run_on_an_outbox_in_memory(billing: Consumer, mailboat_bench: Any) -> None:
    async with mailboat_bench(billing, max_attempts=3) as box:
        await box.send("order.placed", {"total": 5}, key="o-1")
        await box.send("order.placed", {"total": -1}, key="o-2")
        await box.send("order.placed", {"total": 13}, key="o-3")
        await box.send("order.placed", {"total": 0}, key="o-4")
        await box.send("order.placed", {"total": 7}, key="o-4")
        await box.send("order.lost", key="o-5")
        assert [event.key for event in box.handled_events] == ["o-1"]
        assert [(each.reason, each.attempts) for each in box.dead_letters] == [
            ("Refused", 1),
            ("HandlerFailed", 3),
            ("NoHandler", 1),
        ]
        assert "thirteen" in box.dead_letters[1].error
        assert [event.key for event in box.parked] == ["o-4", "o-4"]
        await box.advance(minutes=5)
        assert [event.json()["total"] for event in box.handled_events] == [5, 0, 7]
        assert [(each.type, each.key, each.tags) for each in box.emitted][:1] == [("invoice.written", "o-1", ("a b",))]
        await box.replay()
        assert len(box.dead_letters) == 3


@pytest.mark.parametrize("point", ConsumerPoint)
async def test_a_crash_at_any_point_loses_and_doubles_nothing(billing: Consumer, point: ConsumerPoint) -> None:
    async with bench(billing) as box:
        with box.crash(point.value):
            await box.send("order.placed", {"total": 13 if point.value in ("rolled-back", "refused") else 5}, key="o-1")
        await box.send("order.placed", {"total": 6}, key="o-1")
        assert len(box.handled_events) + len(box.dead_letters) == 2
        assert len(box.emitted) == len(box.handled_events)


async def test_an_event_that_always_kills_is_given_up_in_memory_too(billing: Consumer) -> None:
    async with bench(billing, max_attempts=2) as box:
        with box.crash("pulled", times=2):
            await box.send("order.placed", {"total": 5})
        assert [(each.reason, each.attempts) for each in box.dead_letters] == [("ConsumerDied", 2)]


async def test_dead_letters_are_emitted_as_the_database_emits_them(billing: Consumer, outbox: Database) -> None:
    """The documents differ only in ids, positions and times."""
    refused: dict[str, Any] = {
        "type": "order.placed",
        "payload": {"total": -1},
        "key": "o-1",
        "headers": {"a": "b"},
        "tags": ["t"],
    }
    unhandled: dict[str, Any] = {"type": "order.lost", "payload": b"\x00\xff", "key": "o-2"}
    own: dict[str, Any] = {"type": "mailboat.dead-letter", "key": "o-3"}
    async with bench(billing, emit_dead_letters=True) as box:
        for event in (refused, own):
            await box.send(**event)
        await box.send(**unhandled, content_type="image/png")
    assert [each.key for each in box.emitted] == ["o-1", "o-2"]
    assert len(box.dead_letters) == 3

    spec = {"sink": {"pull": {"emitDeadLetters": True}}, "partitions": 1}
    real = Consumer("shop/billing", url=outbox.url, spec=spec)
    real.dispatcher.handlers += billing.dispatcher.handlers
    with psycopg.connect(outbox.url) as connection:
        emit(connection, **refused)
        emit(connection, **unhandled, content_type="image/png")
    stop = asyncio.Event()
    consumption = asyncio.create_task(real.serve(stop))
    letters = "select key, tags, payload from mailboat.outbox where event_type = 'mailboat.dead-letter' order by key"
    await await_until(lambda: len(outbox.execute(letters)) == 2, what="both dead letters")
    stop.set()
    await consumption
    in_memory = [(each.key, list(each.tags), _lasting(each.json())) for each in box.emitted]
    assert in_memory == [(key, tags, _lasting(json.loads(text))) for key, tags, text in outbox.execute(letters)]


def _lasting(document: dict[str, Any]) -> dict[str, Any]:
    for part, name in ((document, "failedAt"), (document["originalEvent"], "createdAt")):
        part[name] = datetime.fromisoformat(part[name]).utcoffset() == timedelta(0)
    document["originalEvent"]["id"] = len(document["originalEvent"]["id"])
    document["source"] = sorted(document["source"])
    return document


async def test_emitted_events_of_a_transaction(outbox: Database) -> None:
    with psycopg.connect(outbox.url) as connection:
        emit(connection, "order.placed", {"total": 5}, key="o-1", headers={"tenant": "acme"})
        found = assert_emitted(connection, "order.placed", {"total": 5}, key="o-1", headers={"tenant": "acme"})
        assert found == emitted(connection)[0]
        with pytest.raises(AssertionError, match=r"order.placed \(key='o-2'\) was emitted 0 times, not 1. Emitted:"):
            assert_emitted(connection, "order.placed", key="o-2")
        connection.rollback()
        assert emitted(connection) == []
    engine = sqlalchemy.create_engine(outbox.url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as session:
        emit(session, "order.placed", b"raw")
        assert_emitted(session, "order.placed", b"raw")
    async with await psycopg.AsyncConnection.connect(outbox.url) as asynchronous:
        await emit(asynchronous, "order.placed")
        await assert_emitted(asynchronous, "order.placed", None)  # type: ignore[misc]
    assert mailboat.migrate(engine).applied == ()
    engine.dispose()


def test_a_database_is_migrated_by_a_function(database: Database) -> None:
    assert mailboat.migrate(database.url).applied
    with psycopg.connect(database.url) as connection:
        assert mailboat.migrate(connection).applied == ()
