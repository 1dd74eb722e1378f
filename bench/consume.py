"""Consumers behind Kafka: the engine with an empty handler, without and with claims in Redis.

The reference is a common hand-written loop, with one awaited ``SET NX EX`` per event.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

import redis.asyncio
from confluent_kafka import Consumer, Producer
from measurement import Measured, Stopwatch

from mailboat import Event
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.engine import BrokerEngine, EngineSettings
from mailboat.consumer.broker.execution import PlainExecution
from mailboat.consumer.broker.kafka_client import consumer_settings
from mailboat.consumer.broker.kafka_source import KafkaSource
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import handler

_NAME = "bench/consumer"
_KEYS = 5_000


def fill_topic(bootstrap: str, topic: str, events: int) -> None:
    """Produce events of 200 bytes and 5,000 keys, in the format of a relay."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "log_level": 0})
    headers = {
        "ce_specversion": "1.0",
        "ce_type": "order.placed",
        "ce_source": "/shop",
        "ce_time": "2026-01-01T00:00:00Z",
    }
    for number in range(events):
        produced = False
        while not produced:
            try:
                producer.produce(topic, b"x" * 200, f"key-{number % _KEYS}", headers={**headers, "ce_id": str(uuid4())})
                produced = True
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def consume(bootstrap: str, topic: str, events: int, redis: str | None, concurrency: int) -> Measured:
    """Handle a number of events of the topic in one process. The first tenth is not measured."""
    return asyncio.run(_consume(bootstrap, topic, events, redis, concurrency))


async def _consume(bootstrap: str, topic: str, events: int, redis: str | None, concurrency: int) -> Measured:
    dispatcher = Dispatcher(_NAME)
    warm, enough = asyncio.Event(), asyncio.Event()

    async def handle(event: Event) -> None:
        if dispatcher.counts.handled >= events // 10:
            warm.set()
        if dispatcher.counts.handled >= events - 1:
            enough.set()

    dispatcher.add(handler("*", handle))
    group = f"bench-{uuid4()}"
    client = consumer_settings([bootstrap], {}, {}, subscription=_NAME, group=group)
    engine = BrokerEngine(
        dispatcher,
        KafkaSource(client, topic, decode, consumer=_NAME),
        None if redis is None else RedisClaims(redis, consumer=group),
        PlainExecution(1),
        None,
        EngineSettings(consumer=_NAME, concurrency=concurrency, timeout=30.0),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(engine.run(stop))
    await warm.wait()
    watch, before = Stopwatch(), dispatcher.counts.handled
    await enough.wait()
    found = watch.stop(dispatcher.counts.handled - before)
    stop.set()
    await running
    return found


def consume_with_bare_keys(bootstrap: str, topic: str, events: int, url: str) -> Measured:
    """Handle a number of events by a plain loop, to measure its cost.

    The loop reads a batch from Kafka, awaits one SET NX per event, calls an empty handler, and commits per batch. If a
    crash interrupts a handler, the event is lost.
    """
    return asyncio.run(_consume_with_bare_keys(bootstrap, topic, events, url))


async def _consume_with_bare_keys(bootstrap: str, topic: str, events: int, url: str) -> Measured:
    async def handle(value: bytes | None) -> None: ...

    group = f"bench-{uuid4()}"
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    client, handled, before, watch = redis.asyncio.Redis.from_url(url), 0, 0, Stopwatch()
    while handled < events:
        messages = consumer.consume(min(500, events // 10), 1.0)  # the first tenth is not measured
        for message in messages:
            event_id = dict(message.headers() or ())["ce_id"]
            if await client.set(f"bare:{group}:{event_id!r}", "1", nx=True, ex=2_592_000):
                await handle(message.value())
            handled += 1
        if messages:
            consumer.commit(asynchronous=True)
        if not before and handled >= events // 10:
            watch, before = Stopwatch(), handled
    found = watch.stop(handled - before)
    consumer.close()
    await client.aclose()
    return found
