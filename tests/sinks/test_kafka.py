"""The Kafka sink beyond the common contract: settings, limits of topics, partitioning, failed logins."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from mailboat.errors import ConfigError, EventRefused, SinkUnavailable
from mailboat.model import Message
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.kafka.cluster import TopicFacts, describe_topics
from mailboat.sinks.kafka.kafka_errors import Report, more_specific, no_answer
from mailboat.sinks.kafka.librdkafka_settings import producer_settings
from mailboat_spec.resources import kafka_settings
from support.sink_backends import KafkaBackend, Opened, context, message, publish_until_delivered
from support.wait import await_until, wait_until


def build(
    config: dict[str, str] | None = None,
    secrets: dict[str, str] | None = None,
    timeout: float = 2,
    topic: str = "orders",
) -> KafkaSink:
    model = SimpleNamespace(bootstrap_servers=("127.0.0.1:1",), topic=topic, config=config or {})
    return KafkaSink.build(model, context(timeout, secrets))


@pytest.mark.parametrize("code", [KafkaError._SSL, KafkaError._TRANSPORT])
def test_a_tls_error_of_any_code_is_reported_as_tls(code: int) -> None:
    text = "sasl_ssl://k:9092/bootstrap: error:0A000086:SSL routines::certificate verify failed (after 15ms)"
    error = no_answer("k:9092", 5, Report.of(KafkaError(code, text), "orders", -1))
    assert str(error) == f"TLS to Kafka at k:9092 failed: {text}; check ssl.* and security.protocol"


class RefusedLogin(AdminClient):
    """A client whose login is refused before the broker closes the connection."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._report = settings["error_cb"]

    def list_topics(self, *_: Any, **__: Any) -> Any:
        for code in (KafkaError._AUTHENTICATION, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            self._report(KafkaError(code))
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def test_a_refused_login_is_reported_although_the_broker_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mailboat.sinks.kafka.cluster.AdminClient", RefusedLogin)
    topics = describe_topics({"bootstrap.servers": "127.0.0.1:1"}, ["orders"], timeout=0.2)
    assert "refused the login" in str(topics["orders"])


@pytest.mark.parametrize(
    ("codes", "kept"),
    [
        ((KafkaError._TRANSPORT, KafkaError._AUTHENTICATION, KafkaError._TRANSPORT), KafkaError._AUTHENTICATION),
        ((KafkaError._AUTHENTICATION, KafkaError._ALL_BROKERS_DOWN), KafkaError._AUTHENTICATION),
        ((KafkaError._AUTHENTICATION, KafkaError._SSL), KafkaError._SSL),
        ((KafkaError._RESOLVE, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN), KafkaError._TRANSPORT),
        ((KafkaError._ALL_BROKERS_DOWN,), None),
    ],
)
def test_the_cause_is_kept_and_its_consequences_are_not(codes: tuple[int, ...], kept: int | None) -> None:
    report: Report | None = None
    for code in codes:
        report = more_specific(report, Report.of(KafkaError(code), "orders", -1))
    assert (report and report.code) == kept


def test_an_error_about_a_topic_keeps_no_client_alive() -> None:
    def clients_threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir() if _name(task).startswith("rdk:")}

    before = clients_threads()
    topics = describe_topics({"bootstrap.servers": "127.0.0.1:1"}, ["orders"], timeout=0.2)
    assert isinstance(topics["orders"], SinkUnavailable)
    # /proc may list an ended thread for a moment.
    wait_until(lambda: clients_threads() <= before, what=f"the end of the client's threads, with {topics!r} referenced")


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # the thread ended
        return ""


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
        ("sasl.kerberos.kinit.cmd", "curl evil"),
        ("ssl.key.location", "/var/run/secrets/other/key"),
        ("sasl.oauthbearer.assertion.private.key.file", "/var/run/secrets/other/key"),
        ("linger.msec", "5"),
        ("error_cb", "f"),
    ],
)
def test_forbidden_settings_are_refused(name: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^shop/orders: spec\.sink\.kafka\.config: {name} is none of the librdkafka settings"
    ):
        build({name: value})
    with pytest.raises(ConfigError, match=rf"the Secret of configSecretRef: {name} is none"):
        build(secrets={name: value})


def test_allowed_settings_exist_run_no_command_read_no_file_and_are_documented() -> None:
    for name in kafka_settings.ALLOWED:
        with pytest.raises(KafkaException) as refused:
            Producer({name: "?", "acks": "?"})
        assert "No such configuration property" not in str(refused.value)
        assert not re.search(r"cmd|location|file|plugin|engine|provider|_cb|keytab|signal", name)
    page = (Path(__file__).parents[2] / "docs" / "destinations.md").read_text(encoding="utf-8")
    table = page.partition("| about | settings |")[2].partition("\n\n")[0]
    assert sorted(re.findall("`(.*?)`", table)) == sorted(kafka_settings.ALLOWED), "docs/destinations.md"


def test_an_error_about_a_secret_setting_does_not_contain_its_value() -> None:
    with pytest.raises(ConfigError) as refused:
        build(secrets={"security.protocol": "hunter2"})

    assert "hunter2" not in str(refused.value)
    assert "security.protocol" in str(refused.value)
    assert refused.value.__cause__ is None


def test_users_may_set_settings_that_do_not_affect_the_guarantees() -> None:
    settings = producer_settings(
        {"bootstrap.servers": "a:1", "linger.ms": "20", "compression.type": "zstd"}, max_message_bytes=2_000_000
    )

    assert settings["linger.ms"] == "20"
    assert settings["compression.type"] == "zstd"
    assert settings["acks"] == "all"
    assert settings["message.max.bytes"] == 2_000_000


@pytest.mark.parametrize(
    ("user", "topic", "limit"),
    [
        ({}, 50_000, 50_000),
        ({}, None, 100_000_000),
        ({"message.max.bytes": "70000"}, None, 70_000),
        ({"message.max.bytes": "70000"}, 50_000, 50_000),
        ({"message.max.bytes": "70000"}, 90_000, 70_000),
    ],
)
def test_the_size_limit_of_the_client_is_the_smaller_one_of_topic_and_user(
    user: dict[str, str], topic: int | None, limit: int
) -> None:
    settings = producer_settings({"bootstrap.servers": "a:1", **user}, max_message_bytes=topic)

    assert settings["message.max.bytes"] == limit


async def test_the_size_limit_is_that_of_the_topic(kafka: KafkaBackend, opened: Opened) -> None:
    kafka.configure("max.message.bytes", "50000")
    sink = await opened(kafka)

    refusal = sink.refusal(message(1, value=b"." * 50_000))

    assert isinstance(refusal, EventRefused)
    assert "50000" in str(refusal)
    assert kafka.topic in str(refusal)
    fits = [message(number, value=b"." * 40_000) for number in range(10)]
    assert all(sink.refusal(item) is None for item in fits)
    assert await sink.publish(fits) == {}, "a batch is larger than the limit of the topic"


async def test_an_outdated_limit_is_refreshed_before_an_event_is_refused_for_good(
    kafka: KafkaBackend, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mailboat.sinks.kafka.kafka_sink._OUTDATED_AFTER", 3600.0
    )  # longer than the test on any machine
    kafka.configure("max.message.bytes", "50000")
    sink = await opened(kafka)
    large = message(1, value=b"." * 60_000)
    refusal = sink.refusal(large)
    assert refusal is not None
    assert not refusal.retryable, "the limit is fresh"

    kafka.configure("max.message.bytes", "100000")
    monkeypatch.setattr("mailboat.sinks.kafka.kafka_sink._OUTDATED_AFTER", 0.0)
    refusal = sink.refusal(large)
    assert refusal is not None
    assert refusal.retryable, "the limit may be outdated"
    await await_until(lambda: sink.refusal(large) is None, what="the new limit")
    assert await sink.publish([large]) == {}


async def test_a_replayed_event_refreshes_even_a_recent_limit(
    kafka: KafkaBackend, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mailboat.sinks.kafka.kafka_sink._OUTDATED_AFTER", 3600.0)  # for events that are not replayed
    kafka.configure("max.message.bytes", "50000")
    sink = await opened(kafka)
    large, replayed = (message(1, value=b"." * 60_000, **more) for more in ({}, {"mailboat-replay": "true"}))
    kafka.configure("max.message.bytes", "100000")

    def is_retryable() -> bool:
        refusal = sink.refusal(replayed)
        assert refusal is not None
        return bool(refusal.retryable)

    await await_until(is_retryable, what="a retryable refusal")
    refusal = sink.refusal(large)
    assert refusal is not None
    assert not refusal.retryable, "the limit is fresh enough for other events"
    await await_until(lambda: sink.refusal(replayed) is None, what="the new limit")
    assert await sink.publish([replayed]) == {}


class WithoutDescribeConfigs(AdminClient):
    """A client that may write and describe topics, but not their configuration."""

    def describe_configs(self, *_: Any, **__: Any) -> Any:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.fixture
def forbid_describe_configs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("mailboat.sinks.kafka.cluster.AdminClient", WithoutDescribeConfigs)


async def test_if_the_limit_is_unknown_the_broker_decides(
    kafka: KafkaBackend, opened: Opened, forbid_describe_configs: Callable[[], None]
) -> None:
    kafka.configure("max.message.bytes", "3000000")
    forbid_describe_configs()
    sink = await opened(kafka)
    fits, too_large = message(1, value=b"." * 2_000_000), message(2, value=b"." * 4_000_000)
    assert sink.refusal(fits) is None
    assert sink.refusal(too_large) is None

    assert await sink.publish([fits]) == {}
    answer = await sink.publish([too_large])

    assert isinstance(answer[0], EventRefused)
    assert answer[0].reason == "TooLarge"


async def test_a_failed_refresh_keeps_the_known_limit(
    kafka: KafkaBackend,
    opened: Opened,
    forbid_describe_configs: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka.configure("max.message.bytes", "3000000")
    sink = await opened(kafka)
    forbid_describe_configs()
    monkeypatch.setattr("mailboat.sinks.kafka.kafka_sink._OUTDATED_AFTER", 0.0)
    too_large = message(2, value=b"." * 4_000_000)
    for _ in range(2):  # before and after the failed refresh
        refusal = sink.refusal(too_large)
        assert refusal is not None
        assert refusal.retryable, "the limit may be outdated"
        await asyncio.gather(sink._refresh_task)

    assert "3000000" in str(sink.refusal(too_large))
    assert sink.refusal(message(1, value=b"." * 2_000_000)) is None
    assert await sink.publish([message(1, value=b"." * 2_000_000)]) == {}


async def test_headers_count_towards_the_limit(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka)
    too_large = Message("event-1", "k", b"1", {"header": "." * 1_100_000})

    answer = await sink.publish([message(0), too_large, message(2), message(3, key="other")])

    assert isinstance(answer[1], EventRefused)
    assert set(answer) == {1, 2}, "later messages of its key were sent"
    assert {item.value for item in await kafka.receive(2)} == {b"0", b"3"}


async def test_a_message_without_a_key_is_refused_for_a_compacted_topic(kafka: KafkaBackend, opened: Opened) -> None:
    kafka.configure("cleanup.policy", "compact")
    sink = await opened(kafka)

    refusal = sink.refusal(message(1, key=None))

    assert refusal is not None
    assert refusal.reason == "NoKey"
    assert sink.refusal(message(2)) is None


JAVA_HASHES = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
"""Results of the Java client's ``Utils.murmur2``, from Kafka's own tests."""


async def test_a_key_has_the_same_partition_as_with_a_java_producer(kafka: KafkaBackend, opened: Opened) -> None:
    wide = KafkaBackend(kafka.server, partitions=7)
    sink = await opened(wide)

    assert await sink.publish([message(number, key=key) for number, key in enumerate(JAVA_HASHES)]) == {}

    expected = {key: (hashed & 0x7FFFFFFF) % 7 for key, hashed in JAVA_HASHES.items()}
    assert {item.key: item.partition for item in await wide.receive(len(JAVA_HASHES))} == expected
    assert len(set(expected.values())) > 2


async def test_a_message_may_name_another_topic(kafka: KafkaBackend, opened: Opened) -> None:
    dead = KafkaBackend(kafka.server, partitions=1)
    sink = await opened(kafka)

    assert await sink.publish([message(number)._replace(topic=dead.topic) for number in range(3)]) == {}

    assert [item.value for item in await dead.receive(3)] == [b"0", b"1", b"2"]
    assert await kafka.received() == []


async def test_a_missing_dead_letter_topic_fails_at_once_and_blocks_no_other_topic(
    kafka: KafkaBackend, opened: Opened
) -> None:
    # librdkafka itself would wait this long for a missing topic.
    sink = await opened(kafka, timeout=120, config={"topic.metadata.propagation.max.ms": "100000"})
    assert await sink.publish([message(0)]) == {}
    dead = message(0)._replace(topic="no-such-topic")
    session = sink._share.session

    async with asyncio.timeout(60):
        sent, answer = await asyncio.gather(
            sink.publish([message(number) for number in range(1, 100)]), sink.publish([dead])
        )

    assert sent == {}
    assert isinstance(answer[0], SinkUnavailable)
    assert "no-such-topic does not exist" in str(answer[0])
    assert await sink.publish([message(100)]) == {}
    assert sink._share.session is session


async def test_a_dead_letter_topic_that_is_created_later_is_found(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka)
    dead = KafkaBackend(kafka.server, partitions=1)
    dead.delete_topic()
    letter = message(0)._replace(topic=dead.topic)

    async def missing() -> bool:
        return isinstance((await sink.publish([letter])).get(0), SinkUnavailable)

    await await_until(missing, what="the topic to be deleted")
    kafka.server.create_topic(dead.topic, 1)

    await publish_until_delivered(sink, letter)


async def test_after_a_failure_on_another_topic_later_messages_of_the_key_are_not_sent(
    kafka: KafkaBackend, opened: Opened
) -> None:
    sink = await opened(kafka)

    answer = await sink.publish([message(0), message(1)._replace(topic="no-such-topic"), message(2)])

    assert set(answer) == {1, 2}
    assert [item.value for item in await kafka.receive(1)] == [b"0"]
    await sink.close()
    assert isinstance((await sink.publish([message(3)._replace(topic="no-such-topic")]))[0], SinkUnavailable)


async def test_a_deleted_topic_costs_no_attempt(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka, timeout=10)
    await publish_until_delivered(sink, message(1))
    kafka.delete_topic()

    async def answer() -> Any:  # Apache Kafka accepts messages for a moment after the deletion
        return (await sink.publish([message(2)])).get(0)

    assert isinstance(await await_until(answer, what="the topic to be deleted"), SinkUnavailable)
    kafka.server.create_topic(kafka.topic, 1)
    await publish_until_delivered(sink, message(3))


async def test_a_broker_that_does_not_exist_is_named() -> None:
    sink = build(timeout=10)

    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1:1 .*bootstrapServers") as error:
        await sink.open()

    assert "refused" in str(error.value).lower()
    await sink.close()


@pytest.fixture
def slow_brokers(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowBrokers]:
    brokers = SlowBrokers()
    monkeypatch.setattr("mailboat.sinks.kafka.cluster.describe_topics", brokers.describe)
    yield brokers
    brokers.answer.set()


class SlowBrokers:
    """Brokers that answer requests about topics when ``answer`` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.requests = 0

    def describe(self, client: Any, topics: Sequence[str], **__: Any) -> dict[str, TopicFacts]:
        self.requests += 1
        assert self.answer.wait(60)
        return dict.fromkeys(topics, TopicFacts(1))


async def test_sinks_that_wait_for_brokers_do_not_use_up_the_thread_pool(slow_brokers: SlowBrokers) -> None:
    sinks = [build({"client.id": f"relay-{number % 20}"}, topic=f"topic-{number}") for number in range(40)]
    opening = [asyncio.create_task(sink.open()) for sink in sinks]
    await await_until(lambda: slow_brokers.requests == 20, what="one request per client")

    async with asyncio.timeout(10):
        await asyncio.to_thread(lambda: None)  # as the DNS look-up of the database does

    slow_brokers.answer.set()
    await asyncio.gather(*opening)
    assert slow_brokers.requests == 20
    for sink in sinks:
        await sink.close()


async def test_repeated_opens_share_one_request(slow_brokers: SlowBrokers) -> None:
    sink = build()
    for _ in range(5):  # as sessions of a relay whose database is unstable
        opening = asyncio.create_task(sink.open())
        await await_until(lambda: slow_brokers.requests, what="the request")
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    slow_brokers.answer.set()
    await sink.open()
    await sink.open()
    assert slow_brokers.requests == 1

    await sink.close()
    await sink.open()
    assert slow_brokers.requests == 2, "close keeps the facts about the topic"
    await sink.close()


async def test_a_sink_that_is_closed_during_a_request_about_another_topic_creates_no_client(
    slow_brokers: SlowBrokers,
) -> None:
    sink = build(timeout=60)
    publishing = asyncio.create_task(sink.publish([message(1)._replace(topic="dead")]))
    await await_until(lambda: slow_brokers.requests, what="the request")
    await sink.close()
    slow_brokers.answer.set()
    assert str((await publishing)[0]) == "the sink is closed"


async def test_a_wrong_security_protocol_times_out(kafka: KafkaBackend) -> None:
    sink = kafka.sink(timeout=2, config={"security.protocol": "SSL"})

    with pytest.raises(SinkUnavailable):
        await sink.open()
    await sink.close()
