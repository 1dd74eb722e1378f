"""What only Kafka has: settings that must not change, limits that the brokers tell, partitions, logins that fail."""

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
from mailboat.sinks.kafka.kafka_errors import Report, more_telling, no_answer
from mailboat.sinks.kafka.librdkafka_settings import producer_settings
from mailboat.sinks.kafka.topic import TopicFacts, describe_topics
from mailboat_devservers.kafka import KafkaServer
from mailboat_spec.resources import kafka_settings
from support.sink_backends import KafkaBackend, Opened, context, message, until_it_arrives
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
def test_what_openssl_refused_is_called_tls_whatever_the_client_calls_it(code: int) -> None:
    text = "sasl_ssl://k:9092/bootstrap: error:0A000086:SSL routines::certificate verify failed (after 15ms)"
    said = str(no_answer("k:9092", 5, Report.of(KafkaError(code, text), "orders", -1)))
    assert said == f"TLS to Kafka at k:9092 failed: {text}; check ssl.* and security.protocol"


class Refused(AdminClient):
    """A client whose login is refused, and which is hung up on then."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._complain = settings["error_cb"]

    def list_topics(self, *_: Any, **__: Any) -> Any:
        for code in (KafkaError._AUTHENTICATION, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            self._complain(KafkaError(code))
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def test_a_broker_that_hangs_up_after_it_refused_the_login_does_not_hide_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mailboat.sinks.kafka.topic.AdminClient", Refused)
    said = describe_topics({"bootstrap.servers": "127.0.0.1:1"}, ["orders"], timeout=0.2)
    assert "refused the login" in str(said["orders"])


@pytest.mark.parametrize(
    ("complaints", "kept"),
    [
        ((KafkaError._TRANSPORT, KafkaError._AUTHENTICATION, KafkaError._TRANSPORT), KafkaError._AUTHENTICATION),
        ((KafkaError._AUTHENTICATION, KafkaError._ALL_BROKERS_DOWN), KafkaError._AUTHENTICATION),
        ((KafkaError._AUTHENTICATION, KafkaError._SSL), KafkaError._SSL),
        ((KafkaError._RESOLVE, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN), KafkaError._TRANSPORT),
        ((KafkaError._ALL_BROKERS_DOWN,), None),
    ],
)
def test_a_cause_is_kept_before_what_follows_from_it(complaints: tuple[int, ...], kept: int | None) -> None:
    told: Report | None = None
    for code in complaints:
        told = more_telling(told, Report.of(KafkaError(code), "orders", -1))
    assert (told and told.code) == kept


def test_an_error_about_a_topic_keeps_no_client_alive() -> None:
    def clients_threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir() if _name(task).startswith("rdk:")}

    before = clients_threads()
    remembered = describe_topics({"bootstrap.servers": "127.0.0.1:1"}, ["orders"], timeout=0.2)
    assert isinstance(remembered["orders"], SinkUnavailable)
    # One that has ended may be listed for a moment more; one that is kept alive never goes.
    wait_until(lambda: clients_threads() <= before, what=f"the end of the client's threads, with {remembered!r} kept")


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it ended meanwhile
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
def test_settings_that_are_not_for_a_resource_to_set_are_refused(name: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^shop/orders: spec\.sink\.kafka\.config: {name} is none of the librdkafka settings"
    ):
        build({name: value})
    with pytest.raises(ConfigError, match=rf"the Secret of configSecretRef: {name} is none"):
        build(secrets={name: value})


def test_all_that_may_be_set_is_known_to_librdkafka_and_none_of_it_runs_or_reads_anything() -> None:
    for name in kafka_settings.ALLOWED:
        with pytest.raises(KafkaException) as refused:
            Producer({name: "?", "acks": "?"})
        assert "No such configuration property" not in str(refused.value)
        assert not re.search(r"cmd|location|file|plugin|engine|provider|_cb|keytab|signal", name)
    page = (Path(__file__).parents[2] / "docs" / "destinations.md").read_text(encoding="utf-8")
    table = page.partition("| about | settings |")[2].partition("\n\n")[0]
    assert sorted(re.findall("`(.*?)`", table)) == sorted(kafka_settings.ALLOWED), "what the page lists"


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
def test_the_client_refuses_what_topic_or_user_say_and_no_more(
    user: dict[str, str], topic: int | None, limit: int
) -> None:
    settings = producer_settings({"bootstrap.servers": "a:1", **user}, max_message_bytes=topic)

    assert settings["message.max.bytes"] == limit


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


async def test_a_limit_that_was_asked_for_long_ago_is_asked_for_anew_before_an_event_is_given_up(
    kafka: KafkaBackend, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mailboat.sinks.kafka.kafka_sink._DOUBTFUL", 3600.0)  # however slow this machine is
    kafka.configure("max.message.bytes", "50000")
    sink = await opened(kafka)
    large = message(1, value=b"." * 60_000)
    refusal = sink.refusal(large)
    assert refusal is not None
    assert not refusal.retryable, "what is known is fresh"

    kafka.configure("max.message.bytes", "100000")
    monkeypatch.setattr("mailboat.sinks.kafka.kafka_sink._DOUBTFUL", 0.0)
    refusal = sink.refusal(large)
    assert refusal is not None
    assert refusal.retryable, "what is known may be out of date"
    await await_until(lambda: sink.refusal(large) is None, what="the new limit to be known")
    assert await sink.publish([large]) == {}


async def test_what_is_brought_back_seconds_after_it_died_gets_the_limit_that_was_raised_in_between(
    kafka: KafkaBackend, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mailboat.sinks.kafka.kafka_sink._DOUBTFUL", 3600.0
    )  # for all others, however slow this machine is
    kafka.configure("max.message.bytes", "50000")
    sink = await opened(kafka)
    large, replayed = (message(1, value=b"." * 60_000, **more) for more in ({}, {"mailboat-replay": "true"}))
    kafka.configure("max.message.bytes", "100000")

    def doubted() -> bool:
        refusal = sink.refusal(replayed)
        assert refusal is not None
        return bool(refusal.retryable)

    await await_until(doubted, what="a doubt")
    refusal = sink.refusal(large)
    assert refusal is not None
    assert not refusal.retryable, "what is known is fresh enough for all others"
    await await_until(lambda: sink.refusal(replayed) is None, what="the new limit to be known")
    assert await sink.publish([replayed]) == {}


class MayNotAsk(AdminClient):
    """A client that may write, and see topics, but not their configuration."""

    def describe_configs(self, *_: Any, **__: Any) -> Any:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.fixture
def may_not_ask(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("mailboat.sinks.kafka.topic.AdminClient", MayNotAsk)


async def test_where_nobody_says_how_large_a_message_may_be_the_broker_decides(
    kafka: KafkaBackend, opened: Opened, may_not_ask: Callable[[], None]
) -> None:
    kafka.configure("max.message.bytes", "3000000")
    may_not_ask()
    sink = await opened(kafka)
    fits, too_large = message(1, value=b"." * 2_000_000), message(2, value=b"." * 4_000_000)
    assert sink.refusal(fits) is None
    assert sink.refusal(too_large) is None

    assert await sink.publish([fits]) == {}
    answer = await sink.publish([too_large])

    assert isinstance(answer[0], EventRefused)
    assert answer[0].reason == "TooLarge"


async def test_a_question_without_an_answer_changes_nothing_that_is_known(
    kafka: KafkaBackend, opened: Opened, may_not_ask: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.configure("max.message.bytes", "3000000")
    sink = await opened(kafka)
    may_not_ask()
    monkeypatch.setattr("mailboat.sinks.kafka.kafka_sink._DOUBTFUL", 0.0)
    too_large = message(2, value=b"." * 4_000_000)
    for _ in range(2):  # begins to ask; has been told nothing
        refusal = sink.refusal(too_large)
        assert refusal is not None
        assert refusal.retryable, "it may have been raised since, and nobody says"
        await asyncio.gather(sink._refreshing)

    assert "3000000" in str(sink.refusal(too_large))
    assert sink.refusal(message(1, value=b"." * 2_000_000)) is None
    assert await sink.publish([message(1, value=b"." * 2_000_000)]) == {}


async def test_headers_count_too(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka)
    fat = Message("event-1", "k", b"1", {"header": "." * 1_100_000})

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


JAVA_HASHES = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
"""What Kafka's own tests say that ``Utils.murmur2`` of the Java client makes of these keys."""


async def test_a_key_goes_to_the_partition_that_a_java_producer_would_choose(
    kafka: KafkaBackend, opened: Opened
) -> None:
    wide = KafkaBackend(kafka.server, partitions=7)
    sink = await opened(wide)

    assert await sink.publish([message(number, key=key) for number, key in enumerate(JAVA_HASHES)]) == {}

    expected = {key: (hashed & 0x7FFFFFFF) % 7 for key, hashed in JAVA_HASHES.items()}
    assert {item.key: item.partition for item in await wide.receive(len(JAVA_HASHES))} == expected
    assert len(set(expected.values())) > 2


async def test_another_topic_by_the_message_itself(kafka: KafkaBackend, opened: Opened) -> None:
    dead = KafkaBackend(kafka.server, partitions=1)
    sink = await opened(kafka)

    assert await sink.publish([message(number)._replace(topic=dead.topic) for number in range(3)]) == {}

    assert [item.value for item in await dead.receive(3)] == [b"0", b"1", b"2"]
    assert await kafka.received() == []


async def test_a_missing_dead_letter_topic_is_told_at_once_and_stops_nothing_else(
    kafka: KafkaBackend, opened: Opened
) -> None:
    # librdkafka itself would wait that long for a topic that may be new.
    sink = await opened(kafka, timeout=120, config={"topic.metadata.propagation.max.ms": "100000"})
    assert await sink.publish([message(0)]) == {}
    dead = message(0)._replace(topic="no-such-topic")
    session = sink._lane.session

    async with asyncio.timeout(60):
        sent, answer = await asyncio.gather(
            sink.publish([message(number) for number in range(1, 100)]), sink.publish([dead])
        )

    assert sent == {}
    assert isinstance(answer[0], SinkUnavailable)
    assert "no-such-topic does not exist" in str(answer[0])
    assert await sink.publish([message(100)]) == {}
    assert sink._lane.session is session


async def test_a_dead_letter_topic_that_is_made_later_is_found(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka)
    dead = KafkaBackend(kafka.server, partitions=1)
    dead.delete_topic()
    letter = message(0)._replace(topic=dead.topic)

    async def missing() -> bool:
        return isinstance((await sink.publish([letter])).get(0), SinkUnavailable)

    gone: bool = await await_until(missing, what="the topic to be gone")
    assert gone
    kafka.server.create_topic(dead.topic, 1)

    await until_it_arrives(sink, letter)


async def test_behind_what_failed_on_another_topic_nothing_of_the_batch_is_sent(
    kafka: KafkaBackend, opened: Opened
) -> None:
    sink = await opened(kafka)

    answer = await sink.publish([message(0), message(1)._replace(topic="no-such-topic"), message(2)])

    assert set(answer) == {1, 2}
    assert [item.value for item in await kafka.receive(1)] == [b"0"]
    await sink.close()
    assert isinstance((await sink.publish([message(3)._replace(topic="no-such-topic")]))[0], SinkUnavailable)


async def test_a_topic_that_is_deleted_under_the_sink_costs_no_attempt(kafka: KafkaBackend, opened: Opened) -> None:
    sink = await opened(kafka, timeout=10)
    await until_it_arrives(sink, message(1))
    kafka.delete_topic()

    async def answer() -> Any:  # a real broker says that a topic is gone, and takes something for it for a moment more
        return (await sink.publish([message(2)])).get(0)

    assert isinstance(await await_until(answer, what="the topic to be gone"), SinkUnavailable)
    kafka.server.create_topic(kafka.topic, 1)
    await until_it_arrives(sink, message(3))


async def test_a_broker_that_was_never_there() -> None:
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
    """Are asked about a topic, and say nothing until they are told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked = 0

    def describe(self, client: Any, topics: Sequence[str], **__: Any) -> dict[str, TopicFacts]:
        self.asked += 1
        assert self.answer.wait(60)
        return dict.fromkeys(topics, TopicFacts(1))


async def test_brokers_that_keep_many_sinks_waiting_hold_up_nobody_else(slow_brokers: SlowBrokers) -> None:
    sinks = [build({"client.id": f"relay-{number % 20}"}, topic=f"topic-{number}") for number in range(40)]
    opening = [asyncio.create_task(sink.open()) for sink in sinks]
    await await_until(lambda: slow_brokers.asked == 20, what="all to ask, once per client")

    async with asyncio.timeout(10):
        await asyncio.to_thread(lambda: None)  # as the look-up of the database's address does

    slow_brokers.answer.set()
    await asyncio.gather(*opening)
    assert slow_brokers.asked == 20
    for sink in sinks:
        await sink.close()


async def test_a_sink_asks_once_however_often_it_is_opened(slow_brokers: SlowBrokers) -> None:
    sink = build()
    for _ in range(5):  # the sessions of a relay whose database comes and goes
        opening = asyncio.create_task(sink.open())
        await await_until(lambda: slow_brokers.asked, what="the question")
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    slow_brokers.answer.set()
    await sink.open()
    await sink.open()
    assert slow_brokers.asked == 1

    await sink.close()
    await sink.open()
    assert slow_brokers.asked == 2, "what was known is forgotten with the connections"
    await sink.close()


async def test_a_sink_that_is_closed_while_it_asks_about_another_topic_makes_no_client_for_it(
    slow_brokers: SlowBrokers,
) -> None:
    sink = build(timeout=60)
    publishing = asyncio.create_task(sink.publish([message(1)._replace(topic="dead")]))
    await await_until(lambda: slow_brokers.asked, what="the question")
    await sink.close()
    slow_brokers.answer.set()
    assert str((await publishing)[0]) == "the sink is closed"


async def test_a_protocol_that_the_broker_does_not_speak_is_not_waited_for_forever(kafka: KafkaBackend) -> None:
    sink = kafka.sink(timeout=2, config={"security.protocol": "SSL"})

    with pytest.raises(SinkUnavailable):
        await sink.open()
    await sink.close()


async def test_a_cancelled_call_does_not_stop_its_keys_for_good(mortal_kfake: KafkaServer, opened: Opened) -> None:
    kafka = KafkaBackend(mortal_kfake, partitions=1)
    sink = await opened(kafka, timeout=10)
    await until_it_arrives(sink, message(0))
    kafka.go_deaf()
    publishing = asyncio.create_task(sink.publish([message(number) for number in range(1, 50)]))
    await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    kafka.come_back()
    await until_it_arrives(sink, message(50))
