"""A table that the user created: every row that ``verify`` accepts can be read, encoded, parked and dead-lettered."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import pytest_asyncio

from mailboat.cloudevents import DeadLetterNotice, MessageEncoder, dead_letter_message
from mailboat.errors import EventRefused
from mailboat.model import OutboxEvent
from mailboat.store.admin.dead_letters import show_dead
from mailboat.store.admin.selection import Match
from mailboat.store.connection import PostgresConnection
from mailboat.store.outbox_store import Dead, LastFailure, Park, Settlement
from mailboat.store.schema.verify import Finding, verify
from mailboat.store.settings import ReadLimits
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import Format
from support.store_backends import SETTINGS, PostgresWorld, subscription
from support.store_relays import Relay

OWN = TableLayout("shop.events", {"key": "aggregate_id"})
KEY = "6f1a3a3e-6a50-4b8c-9a55-0d3c5c6f1e11"
FAILURE = LastFailure("TooLarge", "too large by half")
MUCH = 1_000_000

_TABLE = """
create schema shop;
create table shop.events (
    id integer generated always as identity primary key,
    xid xid8 default pg_current_xact_id(),
    created_at timestamptz not null default now(),
    event_id uuid not null default gen_random_uuid(),
    event_type varchar(100) not null,
    aggregate_type varchar(100),
    aggregate_id varchar,
    slot integer generated always as (mailboat.key_slot(aggregate_id, id)) stored,
    payload bytea,
    content_type varchar(100),
    headers json,
    tags varchar(20)[],
    traceparent varchar(100)
);
create index on shop.events (xid);
create trigger mailboat_notify after insert on shop.events
    for each statement execute function mailboat.notify_on_insert('shop.events');
insert into mailboat.outboxes (name) values ('shop.events');
"""


@pytest.fixture
def own(each_outbox: Database) -> Database:
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute(_TABLE.encode())
    return each_outbox


@pytest_asyncio.fixture
async def world(own: Database) -> AsyncIterator[PostgresWorld]:
    world = PostgresWorld(own, OWN)
    yield world
    await world.close()


def write(database: Database, **columns: Any) -> None:
    row = {"event_type": "order.placed", "payload": b"{}"} | columns
    with psycopg.connect(database.url) as connection:
        names, places = ", ".join(row), ", ".join(f"%({name})s" for name in row)
        connection.execute(f"insert into shop.events ({names}) values ({places})".encode(), row)


async def look(database: Database, columns: dict[str, str]) -> list[Finding]:
    async with await psycopg.AsyncConnection.connect(database.url) as connection:
        return await verify(connection, TableLayout("shop.events", columns))


async def carried(world: PostgresWorld, **spec: Any) -> tuple[Relay, list[OutboxEvent]]:
    """Return a relay that has read all events, and the events."""
    relay = await Relay.start(world, [subscription(partitions=1, **spec)])
    await relay.claim()
    return relay, await relay.drained()


async def set_aside(relay: Relay, event: OutboxEvent) -> None:
    """Park the event in one settlement, and record it as a dead letter in another."""
    (lease,) = (cursor.lease for cursor in relay.cursors.values())
    await relay.tick(Settlement(lease, None, park=(Park(event, 1, 1, 0.0, FAILURE),)))
    (head,), _ = await relay.store.due(lease, 10, MUCH)
    assert head.event._replace(headers=None) == event._replace(headers=None)
    if event.key is not None:
        assert [each.ordinal for each in await relay.store.queue(lease, event.key, 10, MUCH)] == [head.ordinal]
    await relay.tick(Settlement(lease, None, dead=(Dead(head.event, 1, 2, FAILURE, head.ordinal),)))
    assert await relay.store.parked_keys(lease) == (set(), 0)


def kept_headers(database: Database) -> Any:
    ((headers,),) = database.execute("select headers from mailboat.dead_letters")
    return headers


async def test_verify_accepts_the_result(own: Database) -> None:
    assert await look(own, {"key": "aggregate_id"}) == []


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("kind", ["varchar(64)", "uuid"])
async def test_every_kind_of_column_reaches_the_wire_as_text(
    own: Database, world: PostgresWorld, kind: str, format: Format
) -> None:
    own.execute("alter table shop.events drop column slot")
    own.execute("alter table shop.events add column key text")
    own.execute("alter table shop.events add slot integer generated always as (mailboat.key_slot(key, id)) stored")
    with psycopg.connect(own.url) as connection:
        connection.execute(f"alter table shop.events alter column aggregate_id type {kind} using null".encode())
    world = PostgresWorld(own, TableLayout("shop.events"))
    assert await look(own, {}) == []
    write(own, aggregate_id=KEY, key="k", aggregate_type="order", traceparent="00-1", tags=["eu"], headers='{"a": "b"}')
    relay, (event,) = await carried(world)
    assert (event.aggregate_id, event.aggregate_type, event.tags) == (KEY, "order", "{eu}")
    encoder = MessageEncoder(format, source="test", header_prefix="ce_")
    message = encoder.encode(event, sequence=1, partition=0, generation=1, attempt=1)
    assert all(isinstance(value, str) for value in message.headers.values())
    await set_aside(relay, event)
    await world.close()


async def test_empty_columns_get_defaults(own: Database, world: PostgresWorld) -> None:
    write(own, content_type=None, tags=None)
    relay, (event,) = await carried(world, filter={"tags": {"noneOf": ["eu"]}})
    assert (event.content_type, event.tags) == ("application/json", "{}")
    await set_aside(relay, event)


@pytest.mark.parametrize(
    "wanted", [{"allOf": ["eu"]}, {"anyOf": ["eu", "us"]}, {"noneOf": ["us"]}], ids=["all", "any", "none"]
)
async def test_tags_of_another_kind_are_filtered_by(own: Database, world: PostgresWorld, wanted: Any) -> None:
    write(own, tags=["eu", "new"])
    write(own, tags=["us", "eu"] if "noneOf" in wanted else ["asia"])
    _, (event,) = await carried(world, filter={"tags": wanted, "eventTypes": ["order.*"]})
    assert event.tags == "{eu,new}"


@pytest.mark.parametrize(
    "headers", [r'{"a": "\u0000"}', r'{"a": "\ud800"}', '{"a": 1e400000}', r'{"\u0000": []}'], ids=str
)
async def test_headers_that_the_database_can_not_keep_as_such_are_kept_as_text(
    own: Database, world: PostgresWorld, headers: str
) -> None:
    write(own, headers=headers)
    relay, (event,) = await carried(world)
    with pytest.raises(EventRefused):
        MessageEncoder(Format.RAW, source="test", header_prefix="").encode(
            event, sequence=1, partition=0, generation=1, attempt=1
        )
    await set_aside(relay, event)
    kept = kept_headers(own)
    # a parked event is read from the parked row, where its headers are text
    assert kept == headers or json.loads(kept) == headers


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("created_at", "infinity"),
        ("created_at", "-infinity"),
        ("created_at", "0044-03-15 00:00:00+00 BC"),
        ("created_at", "20000-01-01 00:00:00+00"),
        ("event_type", ""),
    ],
)
async def test_a_row_that_cannot_be_sent_is_refused_kept_and_listed(
    own: Database, world: PostgresWorld, column: str, value: str
) -> None:
    write(own, headers="[]", **{column: value})
    relay = await Relay.start(world, [subscription(partitions=1)])
    await relay.claim()
    (number,) = relay.subscriptions
    assert (await relay.store.backlog(number)).partitions[0].pending == 1
    (event,) = await relay.drained()
    encoder = MessageEncoder(Format.RAW, source="test", header_prefix="")
    with pytest.raises(EventRefused, match=r"can't be sent: its t(ime|ype)") as refusal:
        encoder.encode(event, sequence=1, partition=0, generation=1, attempt=1)
    assert not refusal.value.retryable
    notice = DeadLetterNotice(event, 1, 0, 1, 1, "InvalidEvent", "", None)
    failed_at = datetime.now(UTC)
    assert dead_letter_message(encoder, notice, topic="dead", subscription="all", failed_at=failed_at).event_id
    await set_aside(relay, event)
    assert own.execute(f"select {column}::text from mailboat.dead_letters") == [(value,)]
    link = await PostgresConnection.open(lambda: own.url, "dlq")
    (letter,) = await show_dead(link, Match("shop.events"), limit=1)
    await link.close()
    assert letter["event_id"] == event.event_id


@pytest.mark.parametrize("column", ["payload", "headers", "tags", "aggregate_id", "content_type"])
async def test_a_row_that_is_too_large_for_a_relay_is_refused_without_being_read(
    own: Database, world: PostgresWorld, column: str
) -> None:
    """The rows around it are read as usual."""
    own.execute("alter table shop.events alter column content_type type text, alter column tags type text[]")
    much = "x" * 50_000
    large = {"payload": much.encode(), "headers": json.dumps({"a": much}), "tags": [much]}.get(column, much)
    write(own)
    write(own, **{column: large})
    write(own)
    limits = replace(SETTINGS, limits=ReadLimits(bytes=10_000, row_bytes=40_000))
    relay = await Relay.start(world, [subscription(partitions=1)], settings=limits)
    await relay.claim()
    _, event, _ = await relay.drained()
    with pytest.raises(EventRefused, match=r"has \d+ bytes and was not read") as refusal:
        MessageEncoder(Format.RAW, source="test", header_prefix="").encode(
            event, sequence=1, partition=0, generation=1, attempt=1
        )
    assert (refusal.value.reason, refusal.value.retryable) == ("TooLarge", False)
    assert all(len(value) < 1000 for value in event if isinstance(value, str | bytes))
    await set_aside(relay, event)


async def test_headers_that_can_be_kept_are_kept_as_they_are(own: Database, world: PostgresWorld) -> None:
    write(own, headers='{"tenant": "a\\u00e4"}')
    relay, (event,) = await carried(world)
    await set_aside(relay, event)
    assert kept_headers(own) == {"tenant": "aä"}


async def test_a_key_that_fits_into_no_index_is_parked_in_order(own: Database, world: PostgresWorld) -> None:
    noise = random.Random(1)
    key = "".join(chr(noise.randrange(0x4E00, 0x9FFF)) for _ in range(4000))
    write(own, aggregate_id=key)
    write(own, aggregate_id=key)
    write(own, aggregate_id=key[:-1])
    relay, events = await carried(world)
    (lease,) = (cursor.lease for cursor in relay.cursors.values())
    parks = tuple(Park(event, n, 0, None) for n, event in enumerate(events, 1))
    await relay.tick(Settlement(lease, None, park=parks))
    assert [parked.sequence for parked in await relay.store.queue(lease, key, 10, MUCH)] == [1, 2]
    heads, _ = await relay.store.due(lease, 10, MUCH)
    assert sorted(head.sequence for head in heads) == [1, 3], "the first of each key"


async def test_rows_that_no_relay_can_send_are_found_and_repaired(own: Database) -> None:
    own.execute("alter table shop.events alter column event_id drop default, alter column event_id type text")
    own.execute("alter table shop.events alter column event_type drop not null")
    findings = {finding.where: finding for finding in await look(own, {"key": "aggregate_id"})}
    assert set(findings) == {"shop.events.event_id", "shop.events.event_type"}
    assert findings["shop.events.event_id"].what == "the column is text, and must be uuid"
    with psycopg.connect(own.url) as connection:
        for finding in findings.values():
            connection.execute(finding.sql.encode())
    assert await look(own, {"key": "aggregate_id", "event_id": "mailboat_event_id"}) == []
    write(own, event_id="5d2f3f36-5c4c-4e43-8a7e-0f3e2f6f0f10")
    ((theirs, ours),) = own.execute("select event_id, mailboat_event_id::text from shop.events")
    assert theirs == ours, "the column in use keeps its type, and the new one has its value"
