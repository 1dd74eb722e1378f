"""Encoding of events in each wire format."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest

from mailboat.cloudevents import DeadLetterNotice, MessageEncoder, dead_letter_message
from mailboat.errors import EventRefused
from mailboat.model import Message, OutboxEvent

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EVENT = OutboxEvent(
    id=17,
    event_id="0190f1a0-7c5e-7b6a-8000-000000000001",
    type="order.created",
    aggregate_type="order",
    aggregate_id="o-1",
    key="customer-9",
    payload=b'{"total": 12.50}',
    content_type="application/json",
    headers='{"tenant": "acme"}',
    tags="{}",
    traceparent=TRACE,
    created_at="2026-11-16T03:44:00.123456Z",
    slot=77,
)
BARE = EVENT._replace(aggregate_type=None, aggregate_id=None, key=None, headers=None, traceparent=None)


def encoder(format: str = "CloudEvents", prefix: str = "ce_") -> MessageEncoder:
    return MessageEncoder(format, source="mailboat://shop/orders", header_prefix=prefix)


def encode(event: OutboxEvent, format: str = "CloudEvents", prefix: str = "ce_", replay: bool = False) -> Message:
    return encoder(format, prefix).encode(event, sequence=4711, partition=3, generation=2, attempt=5, replay=replay)


def test_binary_mode_has_all_attributes_in_headers_and_an_unchanged_payload() -> None:
    message = encode(EVENT)

    assert message.event_id == EVENT.event_id
    assert message.key == "customer-9"
    assert message.value == b'{"total": 12.50}'
    assert message.topic is None
    assert message.headers == {
        "ce_specversion": "1.0",
        "ce_source": "mailboat://shop/orders",
        "ce_id": EVENT.event_id,
        "ce_type": "order.created",
        "ce_time": EVENT.created_at,
        "content-type": "application/json",
        "mailboat-sequence": "2.3.4711",
        "mailboat-attempt": "5",
        "ce_subject": "o-1",
        "ce_aggregatetype": "order",
        "ce_partitionkey": "customer-9",
        "ce_traceparent": TRACE,
        "tenant": "acme",
    }


def test_a_missing_attribute_has_no_header() -> None:
    names = encode(BARE).headers.keys()

    assert not names & {"ce_subject", "ce_aggregatetype", "ce_partitionkey", "ce_traceparent"}


def test_the_key_is_sent_as_an_attribute_only_if_it_is_not_the_subject() -> None:
    event = EVENT._replace(key=EVENT.aggregate_id)

    assert "ce_partitionkey" not in encode(event).headers
    assert b"partitionkey" not in (encode(event, "CloudEventsJson").value or b"")


def test_the_sink_chooses_the_prefix_of_attributes() -> None:
    names = encode(EVENT, prefix="ce-").headers.keys()

    assert {"ce-id", "ce-source", "ce-type", "ce-partitionkey", "ce-traceparent"} <= names
    assert not any(name.startswith("ce_") for name in names)


def test_only_a_replay_is_marked_as_one() -> None:
    assert encode(EVENT, replay=True).headers["mailboat-replay"] == "true"
    assert "mailboat-replay" not in encode(EVENT).headers


def test_values_of_one_batch_do_not_leak_into_the_next() -> None:
    same = encoder()
    first = same.encode(EVENT, sequence=1, partition=3, generation=2, attempt=1)
    second = same.encode(EVENT, sequence=2, partition=4, generation=2, attempt=7)

    assert first.headers["mailboat-sequence"] == "2.3.1"
    assert "mailboat-attempt" not in first.headers, "a header for the first attempt"
    assert second.headers["mailboat-sequence"] == "2.4.2"
    assert second.headers["mailboat-attempt"] == "7"


def test_structured_mode_inlines_unchanged_json() -> None:
    message = encode(EVENT, "CloudEventsJson")

    assert message.value is not None
    assert b'"data":{"total": 12.50}' in message.value
    assert json.loads(message.value) == {
        "specversion": "1.0",
        "id": EVENT.event_id,
        "source": "mailboat://shop/orders",
        "type": "order.created",
        "time": EVENT.created_at,
        "datacontenttype": "application/json",
        "subject": "o-1",
        "aggregatetype": "order",
        "partitionkey": "customer-9",
        "traceparent": TRACE,
        "data": {"total": 12.5},
    }
    assert message.headers == {
        "content-type": "application/cloudevents+json; charset=UTF-8",
        "mailboat-sequence": "2.3.4711",
        "mailboat-attempt": "5",
        "tenant": "acme",
    }


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/octet-stream", b"\x00\xff"),
        ("text/plain", b'{"looks": "like JSON"}'),
        ("application/json", b'{"broken"'),
        ("application/json", b'{"not": NaN}'),
        ("application/json", b'"\xff"'),
        ("application/json", b"[" * 100_000),
        ("application/json", b""),
    ],
)
def test_structured_mode_encodes_other_payloads_than_json_as_base64(content_type: str, payload: bytes) -> None:
    message = encode(EVENT._replace(content_type=content_type, payload=payload), "CloudEventsJson")

    assert message.value is not None
    document = json.loads(message.value)
    assert "data" not in document
    assert base64.b64decode(document["data_base64"]) == payload


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.order+JSON"])
def test_json_is_recognized_by_its_media_type(content_type: str) -> None:
    message = encode(EVENT._replace(content_type=content_type), "CloudEventsJson")

    assert message.value is not None
    assert json.loads(message.value)["data"] == {"total": 12.5}


def test_raw_adds_only_the_headers_that_reveal_gaps_and_duplicates() -> None:
    message = encode(EVENT, "Raw")

    assert message.value == EVENT.payload
    assert message.headers == {
        "event_id": EVENT.event_id,
        "mailboat-sequence": "2.3.4711",
        "mailboat-attempt": "5",
        "tenant": "acme",
    }


def test_outbox_names_its_headers_like_the_columns() -> None:
    message = encode(EVENT, "Outbox")

    assert message.value == EVENT.payload
    assert message.headers == {
        "event_id": EVENT.event_id,
        "event_type": "order.created",
        "aggregate_type": "order",
        "aggregate_id": "o-1",
        "created_at": EVENT.created_at,
        "traceparent": TRACE,
        "mailboat-sequence": "2.3.4711",
        "mailboat-attempt": "5",
        "tenant": "acme",
    }


@pytest.mark.parametrize("format", ["CloudEvents", "CloudEventsJson", "Outbox", "Raw"])
def test_a_tombstone_has_no_value_in_any_format_and_keeps_its_id(format: str) -> None:
    message = encode(EVENT._replace(payload=None), format)

    assert message.value is None
    assert EVENT.event_id in message.headers.values()
    assert message.headers.get("content-type", "application/json") == "application/json"


@pytest.mark.parametrize(
    "name",
    [
        "ce_id",
        "CE_Type",
        "event_id",
        "content-type",
        "Content-Type",
        "mailboat-sequence",
        "mailboat-invented",
        "traceparent",
    ],
)
def test_application_headers_never_overwrite_reserved_ones(name: str) -> None:
    headers = encode(EVENT._replace(headers=json.dumps({name: "forged", "kept": "yes"}))).headers

    assert "forged" not in headers.values()
    assert headers["kept"] == "yes"


def test_applications_may_add_extension_attributes_and_their_own_trace() -> None:
    headers = encode(BARE._replace(headers=json.dumps({"ce_tenant": "acme", "traceparent": TRACE}))).headers

    assert headers["ce_tenant"] == "acme"
    assert headers["traceparent"] == TRACE


@pytest.mark.parametrize(
    "headers",
    [
        "[]",
        '"text"',
        "not JSON",
        '{"n": 1}',
        '{"n": null}',
        '{"n": ["a"]}',
        '{"n": "a\\u0000b"}',
        '{"": "a"}',
        '{"n": "\\ud800"}',
        '{"n": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda headers: headers[:20],
)
def test_headers_that_are_not_an_object_of_strings_refuse_the_event(headers: str) -> None:
    with pytest.raises(EventRefused, match="emit headers as an object of strings") as refused:
        encode(EVENT._replace(headers=headers))

    assert refused.value.reason == "InvalidHeaders"
    assert not refused.value.retryable
    assert EVENT.event_id in str(refused.value)


def dead(event: OutboxEvent, format: str = "CloudEvents", error: str = "above the topic's limit") -> Message:
    notice = DeadLetterNotice(event, 4711, 3, 2, 25, "TooLarge", error, "2026-11-16T03:45:00Z")
    failed_at = datetime(2026, 11, 16, 4, 45, tzinfo=UTC)
    return dead_letter_message(
        encoder(format), notice, topic="orders.dead", subscription="shop/orders", failed_at=failed_at
    )


@pytest.mark.parametrize("format", ["CloudEvents", "CloudEventsJson", "Outbox", "Raw"])
def test_a_dead_letter_has_the_original_payload_and_its_cause(format: str) -> None:
    letter = dead(EVENT, format)

    assert letter.topic == "orders.dead"
    assert (letter.event_id, letter.key, letter.value) == (EVENT.event_id, EVENT.key, EVENT.payload)
    headers = letter.headers
    assert headers["tenant"] == "acme"
    assert headers["mailboat-sequence"] == "2.3.4711"
    assert {name: value for name, value in headers.items() if name.startswith("mailboat-dead-")} == {
        "mailboat-dead-reason": "TooLarge",
        "mailboat-dead-error": "above the topic's limit",
        "mailboat-dead-attempts": "25",
        "mailboat-dead-first-failed": "2026-11-16T03:45:00Z",
        "mailboat-dead-last-failed": "2026-11-16T04:45:00Z",
        "mailboat-dead-subscription": "shop/orders",
    }


def test_a_dead_letter_s_error_is_cut_at_1_kib_between_characters() -> None:
    letter = dead(EVENT, error="ü" * 2000)

    error = letter.headers["mailboat-dead-error"]
    assert 1000 < len(error.encode()) <= 1024
    assert error.endswith("ü…")


def test_an_event_with_invalid_headers_still_has_a_dead_letter() -> None:
    letter = dead(EVENT._replace(headers="[]"))

    assert letter.value == EVENT.payload
    assert letter.headers["mailboat-dead-reason"] == "TooLarge"
