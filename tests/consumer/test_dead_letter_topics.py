"""Dead letters on real brokers: stored before a write returns, cut if too large, and never lost without an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mailboat.consumer.broker.dead_letter_writer import DeadLetterFormat, DeadLetterTopic
from mailboat.consumer.broker.envelope import restored
from mailboat.consumer.broker.interfaces import DeadLettersUnavailable, DeadRecord, Original
from mailboat.consumer.broker.kafka_dead_letters import KafkaLetters
from mailboat_devservers.kafka import KafkaServer, start_kfake
from mailboat_devservers.pubsub import PubSubServer
from support.broker_messages import KAFKA, PUBSUB, dead
from support.sink_backends import KafkaBackend, PubSubBackend, SharedKafkaBackend
from support.wait import await_until

pytestmark = pytest.mark.asyncio

ORDER = replace(
    KAFKA, value=b'{"total": 1.50}', headers=(("ce_id", b"7"), ("ce_type", b"order.placed"), ("n", b"\xff"), ("n", b""))
)


def stored(backend: KafkaBackend) -> list[Original]:
    client = {"bootstrap.servers": backend.server.bootstrap}
    with KafkaLetters(client, backend.topic, "test") as letters:
        return list(letters.read())


@pytest.fixture(params=["kfake", "apache_kafka"])
def kafka(request: pytest.FixtureRequest) -> SharedKafkaBackend:
    return SharedKafkaBackend(request.getfixturevalue(request.param))


@pytest.mark.parametrize("format", DeadLetterFormat)
async def test_a_stored_dead_letter_is_the_original_and_its_cause(
    kafka: KafkaBackend, format: DeadLetterFormat
) -> None:
    topic = DeadLetterTopic(kafka.sink(), kafka.topic, format=format)
    await topic.write(dead(ORDER))
    await topic.close()

    (message,) = stored(kafka)

    letter = restored(message)
    assert letter.original == ORDER
    assert message.key == ORDER.key
    if format is DeadLetterFormat.RAW:
        assert message.value == ORDER.value
    headers = dict(message.headers)
    assert headers["mailboat-dead-reason"] == b"HandlerFailed"
    assert headers["mailboat-dead-error"] == b"bank.Closed: no such account"
    assert headers["kafka_dlt-original-offset"] == (4711).to_bytes(8, "big")
    assert headers["kafka_dlt-original-partition"] == (3).to_bytes(4, "big")
    assert headers["kafka_dlt-exception-fqcn"] == b"bank.Closed"
    assert headers["kafka_dlt-original-consumer-group"] == b"shop.billing"


@pytest.mark.parametrize(
    ("value", "limit", "truncated"),
    [(b"x" * 7_000, 10_000, "envelope"), (b"x" * 9_000, 10_300, "error"), (b"x" * 9_000, 3_000, "value")],
)
async def test_too_large_for_its_topic_less_of_it_is_stored(
    kafka: KafkaBackend, value: bytes, limit: int, truncated: str
) -> None:
    kafka.configure("max.message.bytes", str(limit))
    original = replace(ORDER, value=value)
    topic = DeadLetterTopic(kafka.sink(), kafka.topic)
    letter = dead(original)
    await topic.write(replace(letter, refusal=replace(letter.refusal, error=letter.refusal.error * 8)))
    await topic.close()

    (message,) = stored(kafka)

    found = restored(message)
    assert (found.truncated, found.has_value) == (truncated, truncated != "value")
    assert (found.original.topic, found.original.partition, found.original.offset) == ("orders", 3, 4711)
    if found.has_value:
        assert found.original == original


async def test_a_topic_that_takes_nothing_is_an_error_with_a_remedy(kafka: KafkaBackend) -> None:
    kafka.configure("max.message.bytes", "300")
    topic = DeadLetterTopic(kafka.sink(), kafka.topic)
    with pytest.raises(DeadLettersUnavailable, match=r"even without its value .*raise the topic's max\.message\.bytes"):
        await topic.write(dead(ORDER))
    await topic.close()


async def test_a_missing_topic_is_an_error_with_a_remedy_until_it_exists(
    kafka: KafkaBackend, unique_name: Callable[[str], str]
) -> None:
    name = unique_name("dead")
    topic = DeadLetterTopic(kafka.sink(topic=name), name)
    with pytest.raises(
        DeadLettersUnavailable, match=r"does not exist.*create it, or correct spec\.delivery\.deadLetter\.topic"
    ):
        await topic.write(dead(ORDER))
    kafka.server.create_topic(name)
    await topic.write(dead(ORDER))
    await topic.close()


async def test_a_write_fails_during_a_broker_outage_and_the_next_one_succeeds(
    or_skip: Callable[[Callable[[], KafkaServer]], KafkaServer], tmp_path: Path
) -> None:
    kafka = KafkaBackend(or_skip(lambda: start_kfake(tmp_path / "kafka")))
    topic = DeadLetterTopic(kafka.sink(timeout=2.0), kafka.topic)
    try:
        await topic.write(dead(ORDER))
        kafka.go_away()
        with pytest.raises(DeadLettersUnavailable, match=f"dead-letter topic {kafka.topic}.*are the brokers up"):
            await topic.write(dead(ORDER))
        kafka.come_back()
        await await_until(lambda: _written(topic, dead(ORDER)), what="the dead letter to be stored")
    finally:
        await topic.close()
        kafka.server.stop()


async def _written(topic: DeadLetterTopic, letter: DeadRecord) -> bool:
    with suppress(DeadLettersUnavailable):
        await topic.write(letter)
        return True
    return False


async def test_pubsub_stores_the_same(pubsub: PubSubServer) -> None:
    backend = PubSubBackend(pubsub)
    original = replace(PUBSUB, value=b'{"total": 1.50}', headers=(("ce-id", b"7"), ("tenant", b"acme")))
    topic = DeadLetterTopic(backend.sink(timeout=2.0), backend.topic)
    raw = DeadLetterTopic(backend.sink(), backend.topic, format=DeadLetterFormat.RAW)
    try:
        backend.go_away()
        with pytest.raises(DeadLettersUnavailable, match=f"dead-letter topic {backend.topic}: Pub/Sub at .*is it up"):
            await topic.write(dead(original))
        backend.come_back()
        await await_until(lambda: _written(topic, dead(original)), what="Pub/Sub to be back")
        await raw.write(dead(original))
        missing = DeadLetterTopic(backend.sink(topic="missing"), "missing")
        with pytest.raises(DeadLettersUnavailable, match=r"does not exist .*correct spec\.delivery\.deadLetter\.topic"):
            await missing.write(dead(original))
        await missing.close()

        received = await backend.receive(2)
    finally:
        await topic.close()
        await raw.close()
        backend.close()

    for message in received:
        headers = tuple((name, value.encode()) for name, value in message.headers.items())
        letter = restored(replace(PUBSUB, value=message.value, headers=headers))
        assert (message.key, letter.reason, letter.consumer) == ("o-1", "HandlerFailed", "shop/billing")
        assert (letter.original.value, letter.original.offset) == (original.value, "8123")
        assert sorted(letter.original.headers) == sorted(original.headers)
