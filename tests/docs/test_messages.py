"""docs/messages.md against the encoder: the headers in each format and spelling, and the example messages."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mailboat.cloudevents import DeadLetterNotice, MessageEncoder, dead_letter_message
from mailboat.delivery.parked_keys import RELAY_DIED
from mailboat.delivery.publish import CANT_ENCODE
from mailboat.model import OutboxEvent
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.pubsub import PubSubSink
from mailboat_spec import Format
from support.markdown import blocks, rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
SHOWN, DOCUMENT = map(json.loads, blocks(PAGE, "json"))
EVENT = OutboxEvent(
    id=1,
    event_id=SHOWN["event_id"],
    type="order.placed",
    aggregate_type="order",
    aggregate_id="o-1",
    key="o-1",
    payload=SHOWN["value"].encode(),
    content_type="application/json",
    headers='{"tenant":"acme"}',
    tags="{}",
    traceparent=None,
    created_at=SHOWN["headers"]["ce_time"],
    slot=0,
)
WHOLE = EVENT._replace(key="customer-9", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
BARE = EVENT._replace(aggregate_type=None, aggregate_id=None, key=None, headers=None)
APPLICATION = {"tenant"}


def encoder(format: Format, prefix: str = KafkaSink.traits.header_prefix) -> MessageEncoder:
    return MessageEncoder(format, source="mailboat/shop/orders", header_prefix=prefix)


def headers(event: OutboxEvent, made_by: MessageEncoder, *, replay: bool = False) -> set[str]:
    attempt = 2 if replay else 1
    message = made_by.encode(event, sequence=2, partition=4, generation=1, attempt=attempt, replay=replay)
    return set(message.headers)


def documented(format: Format, *marks: str) -> set[str]:
    column = 1 + ["CloudEvents", "CloudEventsJson", "Outbox", "Raw"].index(format.value)
    cells = [row[0] for row in rows(PAGE, "## Headers") if row[column] in marks]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("format", list(Format))
def test_the_headers_are_those_of_the_encoder(format: Format) -> None:
    assert documented(format, "always") == headers(BARE, encoder(format))
    assert documented(format, "always", "if any") == headers(WHOLE, encoder(format), replay=True) - APPLICATION


@pytest.mark.parametrize("format", list(Format))
def test_pubsub_headers_are_those_of_the_page(format: Format) -> None:
    names = {re.sub("^ce_", "ce-", name) for name in documented(format, "always")}
    assert names == headers(BARE, encoder(format, PubSubSink.traits.header_prefix))


def test_the_documented_message_is_the_encoding_of_its_event() -> None:
    message = encoder(Format.CLOUD_EVENTS).encode(EVENT, sequence=2, partition=4, generation=1, attempt=1)
    assert SHOWN["headers"] == message.headers
    assert SHOWN["key"] == message.key


def test_the_documented_document_is_the_encoding_of_its_event() -> None:
    message = encoder(Format.CLOUD_EVENTS_JSON).encode(EVENT, sequence=2, partition=4, generation=1, attempt=1)
    assert message.value is not None
    document: dict[str, Any] = json.loads(message.value)
    assert document == DOCUMENT


@pytest.mark.parametrize("format", list(Format))
def test_the_headers_of_a_dead_letter_are_those_that_are_listed(format: Format) -> None:
    made_by = encoder(format)
    letter = dead_letter_message(
        made_by,
        DeadLetterNotice(EVENT, 2, 4, 1, 1, "TooLarge", "the topic takes less", None),
        topic="orders.dead",
        subscription="shop/orders",
        failed_at=datetime.now(UTC),
    )
    listed = {name for cell, _ in rows(PAGE, "## Dead letters") for name in re.findall(r"`([^`]+)`", cell)}
    usual = headers(EVENT, encoder(Format.CLOUD_EVENTS if format is Format.CLOUD_EVENTS_JSON else format))
    assert set(letter.headers) == listed | usual


def test_the_reasons_of_death_are_those_of_the_code() -> None:
    sources = [*(ROOT / "relay/mailboat/sinks").rglob("*.py"), ROOT / "relay/mailboat/cloudevents.py"]
    sources = [file for file in sources if file.name != "settings.py"]
    found = {
        word
        for file in sources
        for line in re.findall(
            r"reason=(.*)|_refused\((?:.|\n)*?(\"[A-Z]\w+\")[,)\n]", file.read_text(encoding="utf-8")
        )
        for word in re.findall(r'"([A-Z]\w+)"', "".join(line))
    }
    (listed,) = (text for cell, text in rows(PAGE, "## Dead letters") if cell == "`mailboat-dead-reason`")
    assert set(re.findall(r"`([A-Z]\w+)`", listed)) == found | {RELAY_DIED, CANT_ENCODE}
