"""``mailboat dlq`` on a consumer's dead-letter topic: shown as written, replayed byte for byte, with none left out."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
import yaml
from click.testing import CliRunner, Result
from confluent_kafka import Producer
from google.pubsub_v1 import PublisherClient, SubscriberClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

import mailboat
from mailboat.cli.main import main
from mailboat.consumer.broker.dead_letter_writer import DeadLetterFormat, DeadLetterTopic
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.interfaces import DeadRecord, Original
from mailboat.consumer.broker.kafka_dead_letters import KafkaLetters
from mailboat.consumer.broker.replay import LetterFilter
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.pubsub import PubSubSink
from mailboat.sinks.pubsub.channel import PubSubEndpoint
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.pubsub import PubSubServer
from mailboat_devservers.redis_server import RedisServer
from support.broker_messages import KAFKA, PUBSUB, dead
from support.manifests import consumed
from support.sink_backends import SharedKafkaBackend
from support.wait import await_until, wait_until


@dataclass
class Consumer:
    """Consumer shop/billing with its own topic and dead-letter topic on a real broker."""

    server: KafkaServer
    folder: Path
    topic: str

    @property
    def client(self) -> dict[str, str]:
        return {"bootstrap.servers": self.server.bootstrap}

    def arguments(self, *arguments: str) -> list[str]:
        return ["dlq", *arguments, "-f", str(self.folder / "billing.yaml"), "--subscription", "billing"]

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, self.arguments(*arguments), terminal_width=100)

    def ok(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def bury(self, *letters: DeadRecord, format: DeadLetterFormat = DeadLetterFormat.ENVELOPE) -> None:
        async def write() -> None:
            topic = f"{self.topic}.billing.dead"
            letters_ = DeadLetterTopic(KafkaSink(topic, dict(self.client), delivery_timeout=60), topic, format=format)
            for letter in letters:
                await letters_.write(letter)
            await letters_.close()

        asyncio.run(write())

    def arrived(self) -> list[Original]:
        """Return the messages of the topic of origin."""
        with KafkaLetters(self.client, self.topic, "test") as messages:
            return list(messages.read())

    def waiting(self) -> int:
        """Return the number of waiting dead letters, as a consumer reports it."""
        with KafkaLetters(self.client, f"{self.topic}.billing.dead", LetterFilter().group("shop.billing")) as letters:
            return letters.waiting()

    def letter(self, number: int, **changes: object) -> DeadRecord:
        headers = (("ce_id", f"{number}".encode()), ("ce_type", b"order.placed"), ("n", b"\xff"), ("n", b""))
        key = f"o-{number % 3}".encode()
        original = replace(KAFKA, topic=self.topic, key=key, offset=number, value=b'{"total": 1.50}', headers=headers)
        return dead(replace(original, **changes))  # type: ignore[arg-type]


@pytest.fixture(params=["kfake", pytest.param("apache_kafka", marks=pytest.mark.verify)])
def consumer(request: pytest.FixtureRequest, tmp_path: Path, unique_name: Callable[[str], str]) -> Consumer:
    server: KafkaServer = request.getfixturevalue(request.param)
    topic = unique_name("orders")
    source = {"kafka": {"bootstrapServers": [server.bootstrap], "topic": topic}}
    (tmp_path / "billing.yaml").write_text(yaml.safe_dump(consumed(source=source)))
    server.create_topic(topic, 2)
    server.create_topic(f"{topic}.billing.dead", 2)
    return Consumer(server, tmp_path, topic)


def headers_of(message: Original) -> Mapping[str, bytes]:
    return dict(message.headers)


def test_lists_shows_and_replays_the_dead_letters_of_a_consumer(consumer: Consumer) -> None:
    assert consumer.ok("list") == "no dead letters\n"
    letters = [consumer.letter(number) for number in range(4)]
    consumer.bury(*letters[:2])
    consumer.bury(*letters[2:], format=DeadLetterFormat.RAW)

    first, *others = consumer.ok("list").splitlines()
    assert first.split() == ["ID", "TYPE", "KEY", "ATTEMPTS", "DIED", "REPLAYS", "REASON", "ERROR"]
    assert len(others) == 4
    line = next(each for each in others if "o-1" in each)
    assert "order.placed   o-1   4          2026-11-16T03:45:00Z   0" in line
    assert line.endswith("HandlerFailed   bank.Closed: no such account")
    found = [json.loads(line) for line in consumer.ok("list", "--json", "--key", "o-1").splitlines()]
    assert [each["event_id"] for each in found] == [str(letters[1].record.event.id)]
    shown = consumer.ok("show", found[0]["id"])
    assert 'File "billing.py", line 7' in shown
    assert '"total": 1.50' in shown
    assert f"topic {consumer.topic}, partition 3, offset 1" in shown

    dry = consumer.ok("replay", "--all", "--dry-run")
    assert "order.placed key o-1: would be replayed" in dry
    assert dry.endswith("4 dead letters would be replayed\n")
    assert consumer.arrived() == []
    assert consumer.ok("replay", "--key", "o-0", "--type", "order.*", "--reason", "handlerfailed").startswith("2 dead")
    assert consumer.ok("replay", "--key", "o-0", "--type", "order.*", "--reason", "handlerfailed").startswith("0 dead")
    assert consumer.ok("replay", "--key", "o-1", "--since", "2026-11-17").startswith("0 dead")
    assert consumer.waiting() == 4
    assert consumer.ok("replay", "--all", "--limit", "3").startswith("3 dead")
    assert consumer.waiting() == 1
    assert consumer.ok("replay", "--all", "--rate", "1000").startswith("1 dead")
    assert consumer.ok("replay", "--all").startswith("0 dead")
    assert consumer.ok("list") == "no dead letters\n"
    assert consumer.waiting() == 0
    assert len(consumer.ok("list", "--replayed").splitlines()) == 5

    for message in consumer.arrived():
        record = decode(message)
        (letter,) = (each for each in letters if each.record.event.id == record.event.id)
        assert (message.key, message.value) == (letter.record.original.key, letter.record.original.value)
        assert message.headers[:4] == letter.record.original.headers
        assert (record.event.replay, record.replay_for) == (True, "shop/billing")
        assert headers_of(message)["mailboat-replay-count"] == b"1"
    assert len(consumer.arrived()) == 6


async def test_a_replay_reaches_the_consumer_that_gave_up_and_no_other(consumer: Consumer, valkey: RedisServer) -> None:
    broken = True
    handled: dict[str, list[tuple[bytes | None, bool]]] = {"billing": [], "search": []}
    producer = Producer({**consumer.client, "log_level": 0})

    def emit(payload: bytes) -> None:
        producer.produce(consumer.topic, payload, b"o-1", headers={"ce_id": str(uuid4()), "ce_type": "order.placed"})
        producer.flush(60)

    def handler(name: str) -> mailboat.Consumer:
        source, store = mailboat.Kafka(consumer.server.bootstrap, topic=consumer.topic), mailboat.Redis(valkey.url)
        made = mailboat.Consumer(f"shop/{name}", source=source, idempotency=store if name == "billing" else None)

        @made.on("order.placed")
        async def handle(event: mailboat.Event) -> None:
            if broken and name == "billing" and event.payload == b"2":
                raise mailboat.Refuse("no such account")
            handled[name].append((event.payload, event.replay))

        return made

    for payload in (b"1", b"2", b"3"):
        emit(payload)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as running:
        for name in handled:
            running.create_task(handler(name).serve(stop))
        await await_until(lambda: len(handled["billing"]) == 2 and len(handled["search"]) == 3, what="first handling")
        broken = False
        assert await asyncio.to_thread(consumer.ok, "replay", "--reason", "Refused") == "1 dead letter replayed\n"
        emit(b"4")
        await await_until(lambda: all((b"4", False) in each for each in handled.values()), what="the last event")
        stop.set()
    assert handled["billing"] == [(b"1", False), (b"3", False), (b"2", True), (b"4", False)]
    assert handled["search"] == [(payload, False) for payload in (b"1", b"2", b"3", b"4")]


def test_a_message_without_an_id_keeps_the_one_that_it_was_given(consumer: Consumer) -> None:
    letter = consumer.letter(5, headers=())
    consumer.bury(letter)
    consumer.ok("replay", "--all")

    (message,) = consumer.arrived()
    assert decode(message).event.id == letter.record.event.id


def test_a_dead_letter_replayed_ten_times_needs_the_option_again(consumer: Consumer) -> None:
    consumer.bury(consumer.letter(5, headers=(("mailboat-replay", b"true"), ("mailboat-replay-count", b"10"))))
    told = consumer.ok("replay", "--all")
    assert "was replayed 10 times; say --again to replay it\n0 dead letters replayed" in told
    consumer.ok("replay", "--all", "--again")
    (message,) = consumer.arrived()
    assert [value for name, value in message.headers if name == "mailboat-replay-count"] == [b"11"]


def test_killed_in_the_middle_a_replay_continues_and_leaves_none_out(consumer: Consumer, tmp_path: Path) -> None:
    letters = [consumer.letter(number) for number in range(60)]
    consumer.bury(*letters)
    command = [sys.executable, "-m", "mailboat.cli.main", *consumer.arguments("replay", "--all", "--rate", "5")]
    with subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: len(consumer.arrived()) >= 10, timeout=60, what="part of the replay")
        process.kill()
    before = len(consumer.arrived())

    rest = int(consumer.ok("replay", "--all").split()[0])

    arrived = consumer.arrived()
    assert {decode(each).event.id for each in arrived} == {each.record.event.id for each in letters}
    assert before < 60
    assert len(arrived) == before + rest <= 60 + 5  # at most the batch in flight is sent twice
    for key in (b"o-0", b"o-1", b"o-2"):
        numbers = list(dict.fromkeys(int(headers_of(each)["ce_id"]) for each in arrived if each.key == key))
        assert numbers == sorted(numbers), "in order over both runs, without the repeated ones"


def test_an_original_that_was_too_large_is_read_at_its_origin(consumer: Consumer) -> None:
    producer = Producer({**consumer.client, "log_level": 0})
    producer.produce(consumer.topic, b"x" * 4_000, b"o-1", 0, headers=[("ce_id", b"1"), ("ce_type", b"order.placed")])
    producer.flush(60)
    (original,) = consumer.arrived()
    dead_topic = SharedKafkaBackend(consumer.server, topic=f"{consumer.topic}.billing.dead")
    dead_topic.configure("max.message.bytes", "3000")
    consumer.bury(dead(original), dead(replace(original, offset=17)))

    told = consumer.ok("replay", "--all")

    assert "not replayed, too large and gone from topic" in told
    assert told.endswith("1 dead letter replayed\n")
    _, replayed = consumer.arrived()
    assert (replayed.value, replayed.key, replayed.headers[:2]) == (original.value, original.key, original.headers)


def test_errors_name_the_remedy(consumer: Consumer, tmp_path: Path) -> None:
    consumer.bury(consumer.letter(1))
    assert "there is no dead letter 7:7" in consumer.run("show", "7:7").output
    assert "its retention deletes them" in consumer.run("purge", "--all", "--yes").output
    manifest = yaml.safe_load((tmp_path / "billing.yaml").read_text())
    manifest["spec"]["delivery"] = {"deadLetter": {"topic": "missing"}}
    (tmp_path / "billing.yaml").write_text(yaml.safe_dump(manifest))
    told = consumer.run("list")
    assert told.exit_code == 3
    assert "topic missing does not exist" in told.output
    assert "correct spec.delivery.deadLetter.topic" in told.output


def test_other_messages_on_the_topic_are_passed_over(consumer: Consumer) -> None:
    producer = Producer({**consumer.client, "log_level": 0})
    producer.produce(f"{consumer.topic}.billing.dead", b"not ours")
    producer.flush(60)
    consumer.bury(consumer.letter(1))

    assert len(consumer.ok("list").splitlines()) == 2
    assert consumer.ok("replay", "--all") == "1 dead letter replayed\n"


# ---- Pub/Sub -------------------------------------------------------------------------------------------------------


def test_the_same_on_pubsub(pubsub: PubSubServer, unique_name: Callable[[str], str], tmp_path: Path) -> None:
    topic = unique_name("orders")
    dead_topic = f"{topic}-billing.billing.dead"
    letters = [
        dead(replace(PUBSUB, topic=f"{topic}-billing", offset=str(number), key=key, headers=(("ce-id", key),)))
        for number, key in enumerate((b"o-1", b"o-2", b"o-3"))
    ]
    source = {"pubsub": {"project": "acme", "subscription": f"{topic}-billing", "endpoint": pubsub.host}}
    (tmp_path / "billing.yaml").write_text(yaml.safe_dump(consumed(source=source)))

    def run(*arguments: str) -> str:
        return CliRunner().invoke(main, ["dlq", *arguments, "-f", str(tmp_path)]).output

    async def write(sink: PubSubSink) -> None:
        writer = DeadLetterTopic(sink, dead_topic)
        for letter in letters:
            await writer.write(letter)
        await writer.close()

    with grpc.insecure_channel(pubsub.host) as channel:
        publisher = PublisherClient(transport=PublisherGrpcTransport(channel=channel))
        subscriber = SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))
        for name in (topic, dead_topic):
            publisher.create_topic(name=f"projects/acme/topics/{name}")
        origin = f"projects/acme/subscriptions/{topic}-billing"
        subscriber.create_subscription(name=origin, topic=f"projects/acme/topics/{topic}")
        assert f"subscriptions/{dead_topic} does not exist" in run("list")
        place = f"projects/acme/subscriptions/{dead_topic}"
        subscriber.create_subscription(name=place, topic=f"projects/acme/topics/{dead_topic}")
        asyncio.run(write(PubSubSink("acme", dead_topic, PubSubEndpoint(pubsub.host, plain=True), delivery_timeout=60)))

        assert len(run("list").splitlines()) == 4
        assert "no such account" in run("show", str(letters[1].record.event.id))
        assert run("replay", "--all", "--dry-run").endswith("3 dead letters would be replayed\n")
        assert run("replay", "--key", "o-2") == "1 dead letter replayed\n"
        assert run("replay", "--all") == "2 dead letters replayed\n"
        assert run("list") == "no dead letters\n"

        arrived = subscriber.pull(subscription=origin, max_messages=10, timeout=60).received_messages
    assert sorted(each.message.ordering_key for each in arrived) == ["o-1", "o-2", "o-3"]
    for each in arrived:
        attributes = dict(each.message.attributes)
        assert (attributes["ce-id"], each.message.data) == (each.message.ordering_key, PUBSUB.value)
        assert (attributes["mailboat-replay-for"], attributes["mailboat-replay-count"]) == ("shop/billing", "1")
