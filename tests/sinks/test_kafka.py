"""What only Kafka has: settings that must not change, limits that the brokers tell, partitions, logins that fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from mailboat.errors import ConfigError, EventRefused, SinkUnavailable
from mailboat.events import Outgoing
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.kafka.settings import producer_settings
from sinks.backends import KafkaBackend, Opened, context, message, until_it_arrives


def build(config: dict[str, str] | None = None, secrets: dict[str, str] | None = None) -> KafkaSink:
    model = SimpleNamespace(bootstrap_servers=("127.0.0.1:1",), topic="orders", config=config or {})
    return KafkaSink.build(model, context(2, secrets))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("enable.idempotence", "false"),
        ("enable.gapless.guarantee", "false"),
        ("max.in.flight", "1000"),
        ("bootstrap.servers", "elsewhere:9092"),
        ("message.timeout.ms", "1"),
        ("transactional.id", "t"),
        ("plugin.library.paths", "/lib/evil.so"),
        ("error_cb", "f"),
    ],
)
def test_settings_that_the_guarantees_rest_on_are_refused(name: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^shop/orders: spec\.sink\.kafka\.config must not set {name}: .*remove it$"
    ):
        build({name: value})
    with pytest.raises(ConfigError, match=r"the Secret of configSecretRef must not set"):
        build(secrets={name: value})


def test_a_setting_that_librdkafka_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match=r'"linger\.msec".*mend spec\.sink\.kafka\.config'):
        build({"linger.msec": "5"})


def test_no_secret_is_ever_in_a_message() -> None:
    with pytest.raises(ConfigError) as refused:
        build(secrets={"security.protocol": "hunter2"})

    assert "hunter2" not in str(refused.value)
    assert "security.protocol" in str(refused.value)
    assert refused.value.__cause__ is None


def test_users_choose_what_does_not_touch_the_guarantees() -> None:
    settings = producer_settings(
        {"bootstrap.servers": "a:1", "linger.ms": "20", "compression.type": "zstd"}, max_message_bytes=2_000_000
    )

    assert settings["linger.ms"] == "20"
    assert settings["compression.type"] == "zstd"
    assert settings["acks"] == "all"
    assert settings["message.max.bytes"] == 2_000_000


async def test_the_topic_tells_how_large_a_message_may_be(kafka: KafkaBackend, opened: Opened) -> None:
    kafka.configure("max.message.bytes", "50000")
    sink = await opened(kafka)

    refusal = sink.refusal(message(1, value=b"." * 50_000))

    assert isinstance(refusal, EventRefused)
    assert "50000" in str(refusal)
    assert kafka.topic in str(refusal)
    fits = [message(number, value=b"." * 40_000) for number in range(10)]
    assert all(sink.refusal(item) is None for item in fits)
    assert await sink.publish(fits) == {}, "a batch must not grow above what the topic takes"


async def test_headers_count_too(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka)
    fat = Outgoing("event-1", "k", b"1", [("header", "." * 1_100_000)])

    answer = await sink.publish([message(0), fat, message(2), message(3, key="other")])

    assert isinstance(answer[1], EventRefused)
    assert set(answer) == {1, 2}, "what stands behind it in its key must not be sent"
    assert {item.value for item in await kafka.receive(2)} == {b"0", b"3"}


async def test_a_compacted_topic_takes_no_message_without_a_key(kafka: KafkaBackend, opened: Opened) -> None:
    kafka.configure("cleanup.policy", "compact")
    sink = await opened(kafka)

    refusal = sink.refusal(message(1, key=None))

    assert refusal is not None
    assert refusal.reason == "NoKey"
    assert sink.refusal(message(2)) is None


async def test_another_topic_by_the_message_itself(kafka: KafkaBackend, opened: Opened) -> None:
    dead = KafkaBackend(kafka.server, partitions=1)
    sink = await opened(kafka)

    assert await sink.publish([message(number)._replace(topic=dead.topic) for number in range(3)]) == {}

    assert [item.value for item in await dead.receive(3)] == [b"0", b"1", b"2"]
    assert await kafka.received() == []


async def test_a_topic_that_is_deleted_under_the_sink_costs_no_attempt(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka, timeout=10)
    assert await sink.publish([message(1)]) == {}
    kafka.delete_topic()

    answer = await sink.publish([message(2)])

    assert isinstance(answer[0], SinkUnavailable)
    kafka.server.create_topic(kafka.topic, 1)
    await until_it_arrives(sink, message(3))


async def test_a_broker_that_was_never_there() -> None:
    sink = build()

    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1:1 .*bootstrapServers") as error:
        await sink.open()

    assert "refused" in str(error.value).lower()
    await sink.close()


async def test_a_protocol_that_the_broker_does_not_speak_is_not_waited_for_forever(kafka: KafkaBackend) -> None:
    sink = kafka.sink(timeout=2, config={"security.protocol": "SSL"})

    with pytest.raises(SinkUnavailable):
        await sink.open()
    await sink.close()


async def test_a_cancelled_call_does_not_stop_its_keys_for_good(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka, timeout=10)
    assert await sink.publish([message(0)]) == {}
    kafka.go_deaf()
    publishing = asyncio.create_task(sink.publish([message(number) for number in range(1, 50)]))
    await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    kafka.come_back()
    await until_it_arrives(sink, message(50))
