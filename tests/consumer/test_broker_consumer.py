"""A consumer behind a broker, from its manifest or its arguments to effects and status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aiohttp
import psycopg
import pytest
import yaml
from confluent_kafka import Producer
from pydantic import BaseModel

from mailboat import Consumer, Event, Inbox, Kafka, PubSub, Redis, Refuse
from mailboat.consumer.broker.envelope import restored
from mailboat.consumer.broker.kafka_dead_letters import KafkaLetters
from mailboat.errors import ConfigError
from mailboat.model import Message
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import Database
from mailboat_devservers.pubsub import PubSubServer
from mailboat_devservers.redis_server import RedisServer
from mailboat_spec.consumer_report import ConsumerReport, read_consumer_reports
from support.kafka_feed import committed
from support.manifests import consumed, kafka_sink
from support.sink_backends import KafkaBackend, PubSubBackend, SharedKafkaBackend
from support.wait import await_until

TopicFactory = Callable[..., str]


class Order(BaseModel):
    number: int


class Shop:
    """A topic of orders, its dead-letter topic, and the effects of the handlers."""

    def __init__(self, kafka: KafkaServer, redis: RedisServer, topic: str, name: str) -> None:
        self.kafka, self.redis, self.topic, self.name = kafka, redis, topic, name
        self.effects: dict[str, list[int]] = {}
        self.failures = 0
        self.port = free_port()
        kafka.create_topic(f"{topic}.{name}.dead", 1)

    def emit(self, key: str, number: int, event_type: str = "order.placed") -> UUID:
        event_id = uuid4()
        headers = {"ce_specversion": "1.0", "ce_id": str(event_id), "ce_type": event_type, "ce_source": "shop"}
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap})
        producer.produce(
            self.topic, json.dumps({"number": number}).encode(), key.encode(), headers=list(headers.items())
        )
        assert producer.flush(30) == 0
        return event_id

    def consumer(self, **arguments: Any) -> Consumer:
        """Return a consumer of the topic with claims in Redis, without handlers."""
        source, claims = Kafka(self.kafka.bootstrap, topic=self.topic), Redis(self.redis.url)
        return Consumer(f"shop/{self.name}", **{"source": source, "idempotency": claims, **arguments})

    def handlers(self, consumer: Consumer) -> Consumer:
        consumer.configure(listen=f"127.0.0.1:{self.port}")

        @consumer.on("order.placed")
        async def invoice(order: Order, event: Event) -> None:
            if order.number == 13:
                raise Refuse("unlucky")
            if order.number == 99 or (order.number == 3 and event.attempt < 3):
                self.failures += 1
                raise RuntimeError("the bank is closed")
            self.effects.setdefault(event.key or "", []).append(order.number)

        return consumer

    async def report(self) -> ConsumerReport | None:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{self.port}/status") as answer:
                (report,) = read_consumer_reports(await answer.read()) or ()
                return report
        except aiohttp.ClientError:
            return None

    async def until(self, holds: Callable[[ConsumerReport], Any], what: str) -> ConsumerReport:
        async def look() -> ConsumerReport | None:
            report = await self.report()
            return report if report is not None and holds(report) else None

        report = await await_until(look, what=what)
        assert report is not None, "await_until returns what is true"
        return report


@asynccontextmanager
async def serving(consumer: Consumer) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(consumer.serve(stop))
    try:
        yield
    finally:
        stop.set()
        await task


@pytest.fixture
def shop(kfake: KafkaServer, valkey: RedisServer, kafka_topic: TopicFactory, unique_name: Callable[[str], str]) -> Shop:
    return Shop(kfake, valkey, kafka_topic(kfake, partitions=2), unique_name("billing"))


def manifest(shop: Shop, folder: Path, **spec: Any) -> Path:
    """Write a manifest without an OutboxRelay, and a Secret beside it."""
    secret = folder / "secrets" / "redis"
    secret.mkdir(parents=True, exist_ok=True)
    (secret / "url").write_text(shop.redis.url)
    source = kafka_sink(shop.kafka.bootstrap, shop.topic, **spec.pop("kafka", {}))
    whole = {
        "runtime": "InProcess",
        "filter": {"eventTypes": ["order.*"]},
        "idempotency": {"redis": {"urlSecretRef": {"name": "redis", "key": "url"}}},
        "delivery": {"backoff": {"initial": "10ms", "max": "10ms"}},
        **spec,
    }
    path = folder / "billing.yaml"
    path.write_text(yaml.safe_dump(consumed(shop.name, source, **whole)))
    return path


async def test_a_manifest_becomes_effects_and_a_status(shop: Shop, tmp_path: Path) -> None:
    for number in range(6):
        shop.emit(f"o-{number % 2}", number)
    shop.emit("o-0", 13)
    shop.emit("o-0", 14)
    shop.emit("o-0", 0, "invoice.sent")  # without a handler, and excluded by the filter
    consumer = shop.handlers(Consumer(shop.name, manifests=manifest(shop, tmp_path)))
    consumer.configure(secrets_dir=tmp_path / "secrets")
    async with serving(consumer):
        report = await shop.until(lambda it: it.handled == 7 and it.dead == 1 and it.lag == 0, "all events")
        await shop.until(lambda it: it.dead_letters is not None and it.dead_letters.waiting == 1, "the dead letter")
    assert shop.effects == {"o-0": [0, 2, 4, 14], "o-1": [1, 3, 5]}
    assert shop.failures == 2
    assert (report.name, report.state, report.source and report.source.owned) == (f"shop/{shop.name}", "Running", 2)
    assert report.idempotency is not None
    assert (report.idempotency.reachable, report.idempotency.doubt) == (True, None)
    assert report.dead_letters is not None
    assert report.dead_letters.topic == f"{shop.topic}.{shop.name}.dead"

    # Another group reads the topic from its beginning. Redis has the claims of all handled events.
    again = shop.handlers(Consumer(shop.name, manifests=manifest(shop, tmp_path, kafka={"group": f"{shop.name}.2"})))
    again.configure(secrets_dir=tmp_path / "secrets")
    async with serving(again):
        await shop.until(lambda it: it.duplicates == 8 and it.lag == 0, "duplicates")
    assert shop.effects == {"o-0": [0, 2, 4, 14], "o-1": [1, 3, 5]}


async def test_arguments_have_the_effect_of_a_manifest(shop: Shop) -> None:
    for number in range(4):
        shop.emit("o-0", number)
    spec = {"delivery": {"backoff": {"initial": "10ms", "max": "10ms"}}}
    consumer = shop.consumer(dead_letter=f"{shop.topic}.{shop.name}.dead", concurrency=8, spec=spec)
    async with serving(shop.handlers(consumer)):
        await shop.until(lambda it: it.handled == 4 and it.lag == 0, "all events")
    assert shop.effects == {"o-0": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("break_topic", "mend_topic", "error"),
    [
        pytest.param(
            lambda it: it.delete_topic(), lambda it: it.server.create_topic(it.topic, 1), "does not exist", id="missing"
        ),
        pytest.param(
            lambda it: it.configure("max.message.bytes", "300"),
            lambda it: it.configure("max.message.bytes", "1000000"),
            "raise the topic's max.message.bytes",
            id="too small",
        ),
    ],
)
async def test_a_dead_letter_topic_that_takes_nothing_holds_up_its_key_and_costs_no_attempt(
    shop: Shop, break_topic: Callable[[KafkaBackend], None], mend_topic: Callable[[KafkaBackend], None], error: str
) -> None:
    dead = SharedKafkaBackend(shop.kafka)
    await asyncio.to_thread(break_topic, dead)
    for number in (99, 1):
        shop.emit("bad", number)
    for number in (1, 2, 3):
        shop.emit("good", number)
    spec = {"delivery": {"maxAttempts": 4, "backoff": {"initial": "10ms", "max": "10ms"}}}
    consumer = shop.consumer(dead_letter=dead.topic, spec=spec)
    async with serving(shop.handlers(consumer)):
        report = await shop.until(
            lambda it: it.handled == 3 and it.dead_letters is not None and not it.dead_letters.reachable, "the trouble"
        )
        assert report.dead_letters is not None
        assert error in (report.dead_letters.error or "")
        offsets = await asyncio.to_thread(committed, shop.kafka, shop.topic, f"shop.{shop.name}", 2)
        assert sum(offsets.values()) <= 3, f"the three other events at most may be committed: {offsets}"
        assert shop.effects == {"good": [1, 2, 3]}
        await asyncio.to_thread(mend_topic, dead)
        await shop.until(lambda it: it.handled == 4 and it.lag == 0, "the end of the trouble")
    assert shop.effects == {"good": [1, 2, 3], "bad": [1]}
    with KafkaLetters({"bootstrap.servers": shop.kafka.bootstrap}, dead.topic, "test") as letters:
        (letter,) = map(restored, letters.read())
    assert (letter.original.key, letter.attempts, letter.has_value) == (b"bad", 4, True)
    assert shop.failures == 4 + 2, "four attempts of 99, two of 3"


async def test_an_inbox_gives_handlers_its_transaction(shop: Shop, outbox: Database) -> None:
    outbox.execute("create table invoices (number int)")
    ids = [shop.emit("o-0", number) for number in range(3)]
    consumer = shop.consumer(idempotency=Inbox(outbox.url))
    consumer.configure(listen=f"127.0.0.1:{shop.port}")

    @consumer.on("order.placed")
    async def invoice(order: Order, tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("insert into invoices values (%s)", [order.number])

    async with serving(consumer):
        report = await shop.until(lambda it: it.handled == 3 and it.lag == 0, "all events")
    assert outbox.execute("select number from invoices order by 1") == [(0,), (1,), (2,)]
    marked = outbox.execute(f"select event_id from mailboat.handled where consumer = 'shop/{shop.name}'")
    assert {each for (each,) in marked} == set(ids)
    assert report.idempotency is not None
    assert report.idempotency.kind == "postgres"


async def test_a_broker_unavailable_at_start_is_reported_and_awaited(shop: Shop) -> None:
    consumer = shop.consumer(source=Kafka(f"127.0.0.1:{free_port()}", topic=shop.topic))
    async with serving(shop.handlers(consumer)):
        report = await shop.until(lambda it: it.source is not None and not it.source.reachable, "the trouble")
    assert report.state == "Connecting"
    assert report.source is not None
    assert "can't be reached" in (report.source.error or "")


async def test_a_changed_manifest_is_followed(shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shop.emit("o-0", 1)
    consumer = shop.handlers(Consumer(shop.name, manifests=manifest(shop, tmp_path, state="Paused")))
    consumer.configure(secrets_dir=tmp_path / "secrets")
    async with serving(consumer):
        await shop.until(lambda it: it.state == "Paused", "the state")
        assert shop.effects == {}
        manifest(shop, tmp_path)
        await shop.until(lambda it: it.state == "Running" and it.handled == 1 and it.lag == 0, "the event")
        manifest(shop, tmp_path, idempotency={"redis": {"urlSecretRef": {"name": "redis", "key": "missing"}}})
        await await_until(lambda: "Manifest refused" in caplog.text, what="a refused manifest")
        shop.emit("o-0", 2)
        await shop.until(lambda it: it.state == "Running" and it.handled == 2, "the event after it")
        manifest(shop, tmp_path, state="Paused")
        await shop.until(lambda it: it.state == "Paused", "the state")
        shop.emit("o-0", 3)
    assert shop.effects == {"o-0": [1, 2]}


async def test_settings_that_a_source_does_not_support_are_refused_at_start(shop: Shop, tmp_path: Path) -> None:
    async def with_transaction(event: Event, tx: psycopg.AsyncConnection[Any]) -> None: ...

    def batch(events: list[Event]) -> None: ...

    source = Kafka(shop.kafka.bootstrap, topic=shop.topic)
    for register, words in (
        (lambda consumer: consumer.on("*")(with_transaction), "without an inbox there is no transaction"),
        (lambda consumer: consumer.batch("*")(batch), "@batch is for pull subscriptions"),
    ):
        consumer = Consumer("shop/billing", source=source)
        register(consumer)
        with pytest.raises(ConfigError, match=words):
            await consumer.serve()
    missing = shop.handlers(Consumer(shop.name, manifests=manifest(shop, tmp_path)))
    missing.configure(secrets_dir=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"spec\.idempotency\.redis\.urlSecretRef: key url of secret redis was not"):
        await missing.serve()
    with pytest.raises(ConfigError, match="idempotency= and dead_letter= are for source= only"):
        await shop.handlers(Consumer("shop/billing", dead_letter="x")).serve()


async def test_a_pubsub_subscription_is_a_source(
    pubsub: PubSubServer, valkey: RedisServer, unique_name: Callable[[str], str]
) -> None:
    google = PubSubBackend(pubsub, enable_message_ordering=True)
    sink = google.sink()
    await sink.open()
    headers = {"ce-specversion": "1.0", "ce-type": "order.placed", "ce-source": "shop"}
    for number in range(5):
        message = Message(str(number), "o-0", b'{"number": %d}' % number, {**headers, "ce-id": str(uuid4())})
        assert await sink.publish([message]) == {}
    await sink.close()
    handled: list[int] = []
    source = PubSub("acme", subscription=google.topic, endpoint=pubsub.host)
    consumer = Consumer(f"shop/{unique_name('billing')}", source=source, idempotency=Redis(valkey.url))

    @consumer.on("order.*")
    async def invoice(order: Order) -> None:
        handled.append(order.number)

    async with serving(consumer):
        await await_until(lambda: len(handled) == 5, what="all events")
    google.close()
    assert handled == [0, 1, 2, 3, 4]
