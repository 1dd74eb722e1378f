"""Decoding of broker messages: messages of relays are restored, and no input makes decoding fail."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mailboat.consumer.broker.dead_letter_writer import DeadLetterFormat, forms
from mailboat.consumer.broker.decode import LONGEST_ATTRIBUTE, decode
from mailboat.consumer.broker.envelope import CONTENT_TYPE, restored
from mailboat.consumer.broker.interfaces import Original
from mailboat.model import OutboxEvent as Row
from mailboat_spec import Format
from support.broker_messages import AT, KAFKA, PUBSUB, TRACEBACK, dead, message_of

ID = "0190f1a0-7c5e-7b6a-8000-000000000001"
DOCUMENT = {"content__type": "application/cloudevents+json"}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
)
payloads = st.none() | st.binary(min_size=1) | documents.map(json.dumps).map(str.encode)
rows = st.builds(
    Row,
    id=st.just(17), event_id=st.uuids().map(str), type=texts, aggregate_type=st.none() | texts,
    aggregate_id=st.none() | texts, key=st.none() | texts, payload=payloads,
    content_type=st.sampled_from(["application/json", "application/vnd.shop+json", "application/x-protobuf"]),
    headers=st.none() | st.dictionaries(texts.map(lambda name: f"x-{name}"), texts).map(json.dumps),
    tags=st.just("{}"), traceparent=st.none() | st.just(TRACE),
    created_at=st.just("2026-11-16T03:44:00.123456Z"), slot=st.just(1),
)  # fmt: skip


def with_headers(original: Original, **headers: str | bytes) -> Original:
    pairs = ((name.replace("__", "-"), value) for name, value in headers.items())
    return replace(original, headers=tuple((n, v if isinstance(v, bytes) else v.encode()) for n, v in pairs))


@pytest.mark.parametrize("format", [each.value for each in Format])
@pytest.mark.parametrize("place", [KAFKA, PUBSUB])
@settings(max_examples=40)
@given(row=rows)
def test_decodes_messages_of_relays(format: str, place: Original, row: Row) -> None:
    record = decode(message_of(row, format, place))

    event = record.event
    assert record.cannot_decode is None
    assert (str(event.id), event.key, event.replay) == (row.event_id, row.key, False)
    assert event.payload == row.payload
    assert event.headers == json.loads(row.headers or "{}")
    if format != "Raw":
        assert (event.type, event.traceparent) == (row.type, row.traceparent)
        assert (event.aggregate_type, event.aggregate_id) == (row.aggregate_type, row.aggregate_id)
        assert event.created_at == datetime(2026, 11, 16, 3, 44, 0, 123456, UTC)
    if format == "CloudEvents" or (format == "CloudEventsJson" and row.payload is not None):
        assert event.content_type == row.content_type


def test_data_of_a_document_keeps_every_byte() -> None:
    data = '{ "total": 1.50e1, "text": "\\u00e4", "big": 12345678901234567890 }'
    for document in (
        f'{{"specversion":"1.0","id":"{ID}","type":"t","data":{data}}}',
        f' {{ "data" : {data}, "type":"t", "note": {{"data":1}}, "id":"{ID}" }} ',
    ):
        event = decode(replace(with_headers(KAFKA, **DOCUMENT), value=document.encode())).event
        assert (str(event.id), event.type, event.payload) == (ID, "t", data.encode())


def test_a_foreign_message_without_headers_has_an_id_of_its_place() -> None:
    event = decode(KAFKA).event

    assert (event.type, event.key, event.payload, event.created_at) == ("orders", "o-1", b"{}", AT)
    assert event.id == decode(KAFKA).event.id
    assert (
        len({event.id, decode(replace(KAFKA, offset=4712)).event.id, decode(replace(KAFKA, partition=0)).event.id}) == 3
    )
    assert decode(PUBSUB).event.type == "orders-billing"


@pytest.mark.parametrize("name", ["event_id", "eventId", "id"])
def test_a_foreign_message_keeps_its_producers_id(name: str) -> None:
    assert str(decode(with_headers(KAFKA, **{name: ID})).event.id) == ID
    ours = decode(with_headers(KAFKA, **{name: "order-17"})).event.id
    assert ours == decode(replace(with_headers(KAFKA, **{name: "order-17"}), offset=5)).event.id
    assert ours != decode(with_headers(KAFKA, **{name: "order-18"})).event.id


def test_debezium_outbox_router() -> None:
    event = decode(with_headers(KAFKA, id=ID, eventType="OrderPlaced", tenant="acme")).event

    assert (str(event.id), event.type, event.headers["tenant"]) == (ID, "OrderPlaced", "acme")


def test_a_foreign_cloudevent_keeps_its_source_and_extensions() -> None:
    binary = decode(with_headers(KAFKA, ce_id="7", ce_type="t", ce_source="/crm", ce_tenant="acme")).event
    other = decode(with_headers(KAFKA, ce_id="7", ce_type="t", ce_source="/erp")).event
    document = b'{"id":"7","type":"t","source":"/crm","tenant":"acme","datacontenttype":"text/plain","data":"hi"}'
    structured = decode(replace(with_headers(KAFKA, **DOCUMENT), value=document)).event

    assert binary.headers == {"ce_source": "/crm", "ce_tenant": "acme"}
    assert structured.headers == {"source": "/crm", "tenant": "acme"}
    assert structured.payload == b"hi"
    assert binary.id == structured.id != other.id


def test_a_replay_is_addressed() -> None:
    record = decode(
        with_headers(KAFKA, mailboat__replay="true", mailboat__replay__for="shop/billing", mailboat__replay__count="2")
    )

    assert (record.event.replay, record.replay_for, record.event.headers) == (True, "shop/billing", {})


def test_binary_keys_and_headers_are_legible() -> None:
    event = decode(replace(KAFKA, key=b"\xff\x01", headers=(("offset", b"\x00\xfe"),))).event

    assert (event.key, event.headers["offset"]) == ("\\xff\x01", "\x00\\xfe")


@pytest.mark.parametrize(
    ("value", "headers", "why"),
    [
        (b"{}", {"ce_type": b"\xff"}, "not UTF-8"),
        (b"{}", {"ce_id": ID, "ce_type": "t" * (LONGEST_ATTRIBUTE + 1)}, "its type has 4097 characters"),
        (b"{}", {"event_id": "x" * 1_000_000}, "its id has 1000000 characters"),
        (b"{", DOCUMENT, "not valid JSON"),
        (b'{"id":"1","type":"t","data":{]}', DOCUMENT, "not valid JSON"),
        (b"[" * 100_000, DOCUMENT, "not valid JSON"),
        (b'{"data":' + b"[" * 100_000, DOCUMENT, "nested too deep"),
        (rb'{"id":"\ud800","type":"t"}', DOCUMENT, "not UTF-8"),
        (b"\xff", DOCUMENT, "not UTF-8"),
        (b'{"id":"1"}', DOCUMENT, "no id or no type"),
        (b'{"id":1,"type":"t"}', DOCUMENT, "id of the CloudEvents document is not"),
        (b'{"id":"1","type":"t","data_base64":"?"}', DOCUMENT, "not base64"),
        (b"[]", {"content__type": "application/cloudevents-batch+json"}, "batch"),
        (b"x", {"content__type": "application/cloudevents+avro"}, "another format"),
    ],
)  # fmt: skip
def test_an_invalid_event_is_reported_with_the_reason(value: bytes, headers: dict[str, str], why: str) -> None:
    original = replace(with_headers(KAFKA, **headers), value=value)

    record = decode(original)

    assert why in (record.cannot_decode or "")
    assert record.original is original
    assert (record.event.payload, record.event.key, record.event.id) == (value, "o-1", decode(KAFKA).event.id)


@given(
    value=st.none() | st.binary(),
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                ["ce_id", "ce_type", "ce_time", "event_id", "content-type", "mailboat-replay", "ce_source", "x"]
            ),
            st.binary() | st.sampled_from([b"application/cloudevents+json", b"true", ID.encode()]),
        )
    ),
)
def test_never_raises(value: bytes | None, headers: list[tuple[str, bytes]]) -> None:
    original = replace(KAFKA, value=value, headers=tuple(headers))
    assert decode(original).event.id == decode(original).event.id
    assert isinstance(decode(replace(original, partition=None, offset="m-1")).event.id, UUID)


# ---- dead letters --------------------------------------------------------------------------------------------------

binaries = st.none() | st.binary()
originals = st.builds(
    lambda key, value, headers: replace(KAFKA, key=key, value=value, headers=tuple(headers)),
    key=binaries, value=binaries | documents.map(json.dumps).map(str.encode),
    headers=st.lists(st.tuples(texts | st.sampled_from(["content-type", "id", "mailboat-dead-reason"]), st.binary())),
)  # fmt: skip


@pytest.mark.parametrize("form", range(3))
@settings(max_examples=60)
@given(original=originals | st.builds(message_of, rows, st.sampled_from(list(Format)), st.just(KAFKA)))
@example(original=replace(KAFKA, value=b""))
@example(original=replace(KAFKA, value=b"1,2"))
def test_a_dead_letter_restores_the_original_byte_for_byte(form: int, original: Original) -> None:
    written = list(forms(dead(original), DeadLetterFormat.ENVELOPE, spring=True))[form]

    letter = restored(
        Original(
            topic="x",
            partition=0,
            offset=1,
            timestamp=AT,
            key=original.key,
            value=written.value,
            headers=written.headers,
        )
    )

    assert letter.original == original
    assert (letter.reason, letter.attempts, letter.consumer) == ("HandlerFailed", 4, "shop/billing")
    assert letter.error == (TRACEBACK if form < 2 else "")


@pytest.mark.parametrize("form", range(2))
@pytest.mark.parametrize("original", [KAFKA, PUBSUB, with_headers(KAFKA, ce_id=ID, ce_type="t", tenant="acme")])
def test_a_dead_letter_that_a_tool_copies_back_is_a_replay_for_its_consumer(form: int, original: Original) -> None:
    written = list(forms(dead(original), DeadLetterFormat.ENVELOPE, spring=original.partition is not None))[form]
    copied = replace(original, offset=4800, value=written.value, headers=written.headers)

    record = decode(copied)

    assert (record.event.id, record.event.type) == (decode(original).event.id, decode(original).event.type)
    assert (record.event.replay, record.replay_for) == (True, "shop/billing")
    assert record.original == replace(original, offset=4800)
    if original.partition is not None:  # a consumer of the dead-letter topic receives the envelope
        record = decode(replace(copied, topic="orders.billing.dead"))
        assert (record.event.payload, record.replay_for) == (written.value, None)


def test_a_broken_dead_letter_is_reported() -> None:
    record = decode(replace(with_headers(KAFKA, content__type=CONTENT_TYPE), value=b'{"originalEvent":{}'))

    assert "not a dead letter" in (record.cannot_decode or "")
