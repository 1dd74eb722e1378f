"""The Kafka source with a real broker: commits, run-ahead, drains, group membership (C1, C2, C6, C7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from mailboat.consumer import Event
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.kafka_client import consumer_settings
from mailboat.consumer.broker.kafka_source import KafkaSource
from mailboat.consumer.handlers import handler
from mailboat.errors import ConfigError
from mailboat_devservers.kafka import KafkaServer, start_kfake
from support.broker_parts import NAME, Engine, running
from support.kafka_feed import Feed, committed
from support.wait import await_until

pytestmark = pytest.mark.asyncio


def kafka_source(
    server: KafkaServer, topic: str, group: str, *, protocol: str = "classic", **options: Any
) -> KafkaSource:
    settings = consumer_settings(
        [server.bootstrap], {}, {}, subscription=NAME, group=group, group_protocol=protocol
    ) | options.pop("client", {})
    return KafkaSource(settings, topic, decode, consumer=NAME, **options)


@pytest.fixture(params=[("kfake", "classic"), ("apache_kafka", "consumer")], ids=["classic", "KIP-848"])
def broker(request: pytest.FixtureRequest) -> tuple[KafkaServer, str]:
    name, protocol = request.param
    return request.getfixturevalue(name), protocol


async def test_commits_follow_the_contiguous_position(
    broker: tuple[KafkaServer, str], kafka_topic: Any, unique_name: Callable[[str], str]
) -> None:
    server, protocol = broker
    topic, group = kafka_topic(server, partitions=1), unique_name("group")
    feed, gate, handled = Feed(server, topic), asyncio.Event(), []
    feed.send(["a", "b", "slow", "c", "d"])

    async def handle(event: Event) -> None:
        if event.key == "slow":
            await gate.wait()
        handled.append(event.key)

    def offsets() -> dict[int, int]:
        return committed(server, topic, group, 1)

    source = kafka_source(server, topic, group, protocol=protocol)
    async with running(handle, source=source) as it:
        await await_until(lambda: asyncio.to_thread(offsets), what="a commit")
        assert await asyncio.to_thread(offsets) == {0: 2}, "the commit passed an event that is not handled"
        assert handled == ["a", "b", "c", "d"]
        assert it.engine.state().source.partitions[0].ahead == 3
        gate.set()
        await await_until(lambda: it.engine.state().source.partitions[0].lag == 0)
    assert await asyncio.to_thread(offsets) == {0: 5}
    assert not source.state().partitions


async def test_the_run_ahead_is_bounded_and_other_partitions_continue(
    kfake: KafkaServer, kafka_topic: Any, unique_name: Callable[[str], str]
) -> None:
    topic = kafka_topic(kfake, partitions=2)
    feed, gate, handled, most = Feed(kfake, topic), asyncio.Event(), 0, 0
    feed.send(["stuck", *(f"key-{n % 50}" for n in range(2000))], partition=0)
    feed.send((f"other-{n % 50}" for n in range(2000)), partition=1)

    async def handle(event: Event) -> None:
        nonlocal handled, most
        if event.key == "stuck":
            await gate.wait()
        handled += 1

    source = kafka_source(kfake, topic, unique_name("group"), max_ahead=100)
    async with running(handle, source=source) as it:
        await await_until(lambda: it.engine.state().source.partitions.get(0, it) is not it)
        await await_until(lambda: it.engine.state().source.partitions[0].paused, what="the pause")
        await await_until(lambda: it.engine.state().source.partitions[1].lag == 0, what="the other partition")
        assert 2000 <= handled <= 2000 + 100 + 500, "more than the bound and one batch was received"
        gate.set()
        await await_until(lambda: handled == 4001)
        await await_until(lambda: not it.engine.state().source.partitions[0].paused)


@pytest.mark.parametrize("kind", ["async", pytest.param("sync", marks=pytest.mark.verify)])
async def test_a_revoke_drains_and_the_next_owner_continues_behind(
    broker: tuple[KafkaServer, str], kafka_topic: Any, unique_name: Callable[[str], str], kind: str
) -> None:
    server, protocol = broker
    topic, group = kafka_topic(server, partitions=2), unique_name("group")
    feed, gate, began, handled = Feed(server, topic), asyncio.Event(), [], []

    async def waiting(event: Event) -> None:
        began.append((event.partition, event.key))
        await gate.wait()
        handled.append((event.partition, event.key))

    def blocking(event: Event) -> None:
        began.append((event.partition, event.key))
        while not gate.is_set():
            time.sleep(0.01)  # a handler that can't be interrupted
        handled.append((event.partition, event.key))

    def draining(it: Engine) -> bool:
        """Return whether the second events of the keys were dropped, because the partition is revoked."""
        return it.engine.state().behind < 2

    function = waiting if kind == "async" else blocking
    for partition in (0, 1):
        feed.send([f"first-{partition}", f"second-{partition}", f"first-{partition}"], partition=partition)
    async with running(function, source=kafka_source(server, topic, group, protocol=protocol)) as one:
        await await_until(lambda: len(began) == 4)
        async with running(function, source=kafka_source(server, topic, group, protocol=protocol)) as two:
            await await_until(lambda: one.source.state().partitions and draining(one), what="the revoke")
            gate.set()
            await await_until(lambda: len(one.source.state().partitions) == 1 == len(two.source.state().partitions))
            await await_until(lambda: len(handled) == 6)
    assert sorted(handled) == sorted((p, key) for p in (0, 1) for key in (f"first-{p}", f"first-{p}", f"second-{p}"))
    assert await asyncio.to_thread(committed, server, topic, group, 2) == {0: 3, 1: 3}


@pytest.mark.verify  # a broker's minimum session timeout is 6 s
async def test_long_handlers_do_not_cost_the_membership(
    kfake: KafkaServer, kafka_topic: Any, unique_name: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    topic, calls = kafka_topic(kfake, partitions=1), []

    async def long(event: Event) -> None:
        calls.append(event.key)
        await asyncio.sleep(8)

    async def rude(event: Event) -> None:
        calls.append(event.key)
        time.sleep(8)  # noqa: ASYNC251

    def blocking(event: Event) -> None:
        calls.append(event.key)
        time.sleep(8)

    client = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    source = kafka_source(kfake, topic, unique_name("group"), client=client)
    feed = Feed(kfake, topic)
    for kind in ("xlong", "xblocking", "xrude"):
        feed.send([kind], event_type=kind)
    caplog.set_level("INFO")
    async with running(long, source=source, pattern="xlong") as it:
        it.dispatcher.add(handler("xblocking", blocking))
        it.dispatcher.add(handler("xrude", rude))
        await await_until(lambda: it.dispatcher.counts.handled == 3)
        await await_until(lambda: it.engine.state().source.partitions[0].lag == 0)
    assert sorted(map(str, calls)) == ["xblocking", "xlong", "xrude"]
    assert "Partitions lost" not in caplog.text
    assert caplog.text.count("Partitions assigned") == 1
    assert caplog.text.count("Event loop blocked") == 1
    assert "rude" in caplog.text


async def test_a_broker_outage(
    or_skip: Any, tmp_path: Any, unique_name: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    with or_skip(lambda: start_kfake(tmp_path)) as server:
        server.create_topic("orders", 1)
        feed, handled = Feed(server, "orders"), []

        async def handle(event: Event) -> None:
            handled.append(event.key)

        async with running(handle, source=kafka_source(server, "orders", unique_name("group"))) as it:
            feed.send(["a"])
            await await_until(lambda: handled)
            await asyncio.to_thread(server.kill)
            await await_until(lambda: it.engine.state().source.error is not None)
            assert "can't be reached" in (it.engine.state().source.error or "")
            await asyncio.to_thread(server.launch)
            await await_until(lambda: it.engine.state().source.error is None)
            await asyncio.to_thread(Feed(server, "orders").send, ["b"])
            await await_until(lambda: "b" in handled)
    assert caplog.text.count("Kafka unavailable") == 1


async def test_a_missing_topic_is_reported_and_found_when_it_is_made(
    kfake: KafkaServer, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("late")
    handled: list[str | None] = []

    async def handle(event: Event) -> None:
        handled.append(event.key)

    client = {"topic.metadata.refresh.interval.ms": 500}
    async with running(handle, source=kafka_source(kfake, topic, unique_name("group"), client=client)) as it:
        await await_until(lambda: f"topic {topic} does not exist" in (it.engine.state().source.error or ""))
        await asyncio.to_thread(kfake.create_topic, topic, 1)
        await asyncio.to_thread(Feed(kfake, topic).send, ["a"])
        await await_until(lambda: handled == ["a"])
        await await_until(lambda: it.engine.state().source.error is None)


@pytest.mark.parametrize(
    ("config", "secrets", "message"),
    [
        ({"enable.auto.commit": "true"}, {}, "spec.source.kafka.config: enable.auto.commit"),
        (
            {"security.protocol": "sasl_ssl", "sasl.mechanism": "nonsense"},
            {"sasl.password": "hunter2"},
            "does not accept",
        ),
    ],
)
async def test_wrong_settings_are_refused(config: Any, secrets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        consumer_settings(["kafka:9092"], config, secrets, subscription=NAME, group="g")
    assert "hunter2" not in str(refused.value)
