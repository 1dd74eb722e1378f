"""The Pub/Sub sink beyond the common contract: limits, requests of one key each, endpoints."""

from __future__ import annotations

import json
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat.errors import ConfigError, EventRefused, SinkUnavailable
from mailboat.model import Message
from mailboat.sinks.pubsub import PubSubSink
from mailboat.sinks.pubsub.channel import PubSubEndpoint
from mailboat.sinks.pubsub.pubsub_sink import GOOD_REQUEST_BYTES, MAX_REQUEST_MESSAGES, request_bytes, requests
from support.sink_backends import POISON, Opened, PubSubBackend, context, message

HEADERS = {"event_id": "event-1"}
UNCONNECTED = PubSubSink("acme", "orders", PubSubEndpoint("pubsub.test:443", plain=True), delivery_timeout=10.0)


@pytest.mark.parametrize(
    ("outgoing", "reason"),
    [
        (Message("1", "k" * 1025, b"", HEADERS), "KeyTooLong"),
        (Message("1", "ü" * 513, b"", HEADERS), "KeyTooLong"),
        (Message("1", "k", b"", {f"h{n}": "" for n in range(101)}), "TooManyHeaders"),
        (Message("1", "k", b"", {"n" * 257: ""}), "InvalidHeaders"),
        (Message("1", "k", b"", {"": "v"}), "InvalidHeaders"),
        (Message("1", "k", b"", {"googclient": "v"}), "InvalidHeaders"),
        (Message("1", "k", b"", {"n": "v" * 1025}), "InvalidHeaders"),
        (Message("1", "k", b"." * 10_000_000, HEADERS), "TooLarge"),
    ],
)
def test_a_message_above_a_limit_of_pubsub_is_refused_before_publishing(outgoing: Message, reason: str) -> None:
    refused = UNCONNECTED.refusal(outgoing)

    assert refused is not None
    assert refused.reason == reason
    assert not refused.retryable


def test_a_message_at_the_limits_is_accepted() -> None:
    headers = {f"{n:03}" + "n" * 253: "v" * 1024 for n in range(100)}

    assert UNCONNECTED.refusal(Message("1", "k" * 1024, b"." * 9_000_000, headers)) is None


@given(st.lists(st.integers(0, 3_000_000), max_size=30))
def test_requests_hold_every_message_once_in_order_and_within_limits(sizes: list[int]) -> None:
    batch = [Message(str(index), "k", bytes(size), HEADERS) for index, size in enumerate(sizes)]

    cut = list(requests(batch, range(len(batch))))

    assert [index for request in cut for index in request] == list(range(len(batch)))
    for request in cut:
        assert 0 < len(request) <= MAX_REQUEST_MESSAGES
        assert len(request) == 1 or sum(request_bytes(batch[index]) for index in request) < GOOD_REQUEST_BYTES


async def test_12_mb_of_one_key_are_split_and_arrive_in_order(google: PubSubBackend, opened: Opened) -> None:
    sink = await opened(google)
    batch = [message(number, value=b"%02d" % number + b"." * 2_000_000) for number in range(6)]

    assert await sink.publish(batch) == {}

    received = await google.receive(6)
    assert [(item.value or b"")[:2] for item in received] == [b"00", b"01", b"02", b"03", b"04", b"05"]


async def test_2500_small_messages_of_one_key_are_split_into_valid_requests(
    google: PubSubBackend, opened: Opened
) -> None:
    sink = await opened(google)

    assert await sink.publish([message(number) for number in range(2500)]) == {}

    assert [item.value for item in await google.receive(2500)] == [b"%d" % number for number in range(2500)]
    assert sum(google.published) == 2500
    assert max(google.published) <= MAX_REQUEST_MESSAGES
    assert MAX_REQUEST_MESSAGES == 1000  # the limit of Pub/Sub


async def test_a_failing_key_does_not_block_other_keys(google: PubSubBackend, opened: Opened) -> None:
    sink = await opened(google)
    other = message(2, key="other")._replace(topic="no-such-topic")

    answer = await sink.publish([message(1), other, message(3)])

    assert set(answer) == {1}
    assert [item.value for item in await google.receive(2)] == [b"1", b"3"]


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, EventRefused),
        (grpc.StatusCode.OUT_OF_RANGE, EventRefused),
        (grpc.StatusCode.FAILED_PRECONDITION, SinkUnavailable),  # no billing, no encryption key, a forbidden region: G4
        (grpc.StatusCode.PERMISSION_DENIED, SinkUnavailable),
        (grpc.StatusCode.ABORTED, SinkUnavailable),
    ],
)
async def test_only_an_error_about_the_message_refuses_it(
    google: PubSubBackend, opened: Opened, answer: grpc.StatusCode, meaning: type[Exception]
) -> None:
    sink = await opened(google)
    google.refuse_poison(answer)

    failures = await sink.publish([message(1, value=POISON)])

    assert isinstance(failures[0], meaning)


def test_only_hosts_of_google_use_tls_and_credentials() -> None:
    assert PubSubEndpoint.choose(None, None, None, "x") == PubSubEndpoint("pubsub.googleapis.com:443", plain=False)
    assert PubSubEndpoint.choose(None, "localhost:8085", None, "x") == PubSubEndpoint("localhost:8085", plain=True)
    assert PubSubEndpoint.choose("emulator:8085", "other:1", None, "x") == PubSubEndpoint("emulator:8085", plain=True)
    regional = "europe-west1-pubsub.googleapis.com:443"
    assert PubSubEndpoint.choose(regional, "localhost:8085", None, "x") == PubSubEndpoint(regional, plain=False)


def test_a_key_file_is_never_sent_in_plain_text() -> None:
    destination = PubSubEndpoint.choose("proxy.example:443", None, json.dumps({"type": "service_account"}), "x")

    assert not destination.plain


def build(secrets: dict[str, str]) -> PubSubSink:
    reference = SimpleNamespace(name="google", key="key.json")
    model = SimpleNamespace(project="acme", topic="orders", endpoint=None, credentials_secret_ref=reference)
    return PubSubSink.build(model, context(2, secrets))


def test_a_secret_that_is_no_key_file_is_not_printed() -> None:
    with pytest.raises(ConfigError, match="no service account's JSON key") as refused:
        build({"key.json": "hunter2"})

    assert "hunter2" not in str(refused.value)
