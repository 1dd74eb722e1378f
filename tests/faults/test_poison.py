"""Undeliverable events block only their own key, have a limit of attempts, and can be replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from mailboat_devservers.pubsub import PubSubServer
from support import admin_actions
from support.collectors import Collector, KafkaCollector, PubSubCollector
from support.inprocess_relay import STAGED, StagedSink, events, serving, write
from support.ledger import check_delivery, payload, sequence_of
from support.manifests import Manifest, kafka_sink, pubsub_sink
from support.relay_processes import outbox_relay, subscription
from support.wait import await_until, wait_until

Stage = dict[str, StagedSink]

SOON: Manifest = {"initial": "20ms", "factor": 1.0, "max": "20ms", "jitter": 0.0}


class _KeepsHeaders(Collector):
    """Collector that also keeps the headers of every message."""

    headers: list[Mapping[str, str]]

    def _take(self, key: str | None, payload: bytes | None, headers: Mapping[str, str]) -> None:
        self.__dict__.setdefault("headers", []).append(headers)
        super()._take(key, payload, headers)


class Topic(_KeepsHeaders, KafkaCollector):
    pass


class PubSubTopic(_KeepsHeaders, PubSubCollector):
    pass


@pytest.fixture(params=["kfake", "apache_kafka", "pubsub"])
def destination(
    request: pytest.FixtureRequest, unique_name: Callable[[str], str]
) -> tuple[Manifest, Collector, str, _KeepsHeaders]:
    """A sink and its collector, and a dead-letter topic and its collector."""
    topic, dead = unique_name("orders"), unique_name("dead")
    if request.param != "pubsub":
        kafka: KafkaServer = request.getfixturevalue(request.param)
        for name in (topic, dead):
            kafka.create_topic(name, 4)
        sink = kafka_sink(kafka.bootstrap, topic)
        return sink, KafkaCollector(kafka.bootstrap, topic), dead, Topic(kafka.bootstrap, dead)
    pubsub: PubSubServer = request.getfixturevalue("pubsub")
    sink = pubsub_sink(pubsub.host, topic)
    return sink, PubSubCollector(pubsub.host, topic), dead, PubSubTopic(pubsub.host, dead)


async def _arrived(collector: Collector, count: int, timeout: float = 60) -> None:
    await await_until(lambda: len(collector.ids) >= count, timeout=timeout, what=f"{count} events at {collector.name}")


@pytest.mark.verify
async def test_one_poison_event_among_ten_thousand(
    outbox: Database, destination: tuple[Manifest, Collector, str, _KeepsHeaders]
) -> None:
    sink, collector, dead_topic, dead = destination
    written = events(10_000, 100)
    poison = written[5_000]
    committed = write(outbox.url, written[:5_000])
    with psycopg.connect(outbox.url) as connection:  # bypasses mailboat.emit, which refuses such headers
        connection.execute(
            "insert into mailboat.outbox (event_id, event_type, key, payload, headers) values (%s, %s, %s, %s, %s)",
            [poison.event_id, "order.placed", poison.key, poison.payload, '{"tenant": 7}'],
        )
    committed |= write(outbox.url, written[5_001:])
    orders = subscription(
        "orders", sink, partitions=4, delivery={"timeout": "10s", "deadLetter": {"topic": dead_topic}}
    )
    with collector, dead:
        async with serving(outbox_relay(outbox.url), orders):
            await _arrived(collector, 9_999)
            await _arrived(dead, 1)
            check_delivery(committed, (), collector.arrivals, gapless=False)
            await await_until(lambda: outbox.execute("select count(*) from mailboat.parked") == [(0,)], what="rest")

            # G6: contents of the dead letter, in the table and on the topic.
            [row] = outbox.execute(
                "select event_id::text, key, payload, reason, attempts, last_error, headers::text,"
                " first_failed_at <= last_failed_at from mailboat.dead_letters"
            )
            assert row[:5] == (poison.event_id, poison.key, poison.payload, "InvalidHeaders", 1)
            assert "tenant" in row[5]
            assert row[6:] == ('{"tenant": 7}', True)
            [notice] = dead.headers
            assert dead.arrivals[0].payload == poison.payload
            assert dead.arrivals[0].key == poison.key
            assert dead.arrivals[0].event_id == poison.event_id
            assert notice["mailboat-dead-reason"] == "InvalidHeaders"
            assert notice["mailboat-dead-error"] == row[5]
            assert notice["mailboat-dead-attempts"] == "1"
            assert notice["mailboat-dead-subscription"] == "faults/orders"
            assert notice["mailboat-dead-first-failed"] <= notice["mailboat-dead-last-failed"]

            # An administrator corrects the headers and replays the event.
            outbox.execute("update mailboat.dead_letters set headers = '{}'")
            assert await admin_actions.replay(outbox, key=poison.key) == 1
            await _arrived(collector, 10_000)
    assert collector.arrivals[-1].event_id == poison.event_id
    assert collector.arrivals[-1].payload == poison.payload
    assert len(collector.arrivals) == 10_000
    assert outbox.execute("select count(*) from mailboat.parked") == [(0,)]


@pytest.mark.verify
@pytest.mark.parametrize("broker", ["kfake", "apache_kafka"])
async def test_a_broker_that_refuses_in_the_middle_of_a_key_stops_the_key(
    request: pytest.FixtureRequest, outbox: Database, unique_name: Callable[[str], str], broker: str
) -> None:
    """The topic's limit is lowered after the sink has read it, so that only the broker can refuse."""
    kafka: KafkaServer = request.getfixturevalue(broker)
    topic = unique_name("orders")
    kafka.create_topic(topic, 2, {"max.message.bytes": "1000000"})
    orders = subscription(
        "orders",
        kafka_sink(kafka.bootstrap, topic),
        partitions=2,
        delivery={"timeout": "10s", "onExhausted": "Block", "backoff": SOON},
    )
    with KafkaCollector(kafka.bootstrap, topic) as collector:
        async with serving(outbox_relay(outbox.url), orders):
            committed = write(outbox.url, events(40, 4))
            await _arrived(collector, 40)
            await asyncio.to_thread(_limit, kafka, topic, 20_000)
            written = events(400, 4, first=11)
            large = written[201]
            written[201] = large._replace(payload=payload(large.key, large.number, filler="x" * 50_000))
            write(outbox.url, written)
            behind = [event for event in written[201:] if event.key == large.key]
            passing = [event for event in written if event not in behind]
            await _arrived(collector, 40 + len(passing))
            await await_until(
                lambda: outbox.execute("select count(*) from mailboat.parked") == [(len(behind),)],
                what="the key to be parked",
            )
            committed |= {event.event_id: event for event in passing}
            # No later event of the key has arrived. The refusal of a broker ends the producer's session. The sink sends
            # the messages in flight to other partitions again, since their outcome is unknown: an ambiguous answer
            # (G9).
            check_delivery(committed, (), collector.arrivals, ambiguous=True, gapless=False)
            [(attempts, blocked, reason)] = outbox.execute(
                "select attempts, blocked, reason from mailboat.parked where attempts > 0"
            )
            assert (attempts, blocked, reason) == (1, True, "TooLarge")

            # An administrator raises the limit and retries: the key resumes where it stopped, in its order.
            await asyncio.to_thread(_limit, kafka, topic, 1_000_000)
            assert await admin_actions.retry(outbox) == 1
            await _arrived(collector, 440)
            await await_until(lambda: outbox.execute("select count(*) from mailboat.parked") == [(0,)], what="rest")
        collector.until_quiet()
    committed |= {event.event_id: event for event in written}
    check_delivery(committed, (), collector.arrivals, ambiguous=True, gapless=False)


@pytest.mark.verify
@pytest.mark.parametrize("refusals", [2, 1000])
async def test_pubsub_that_refuses_in_the_middle_of_a_key_stops_the_key(
    outbox: Database, pubsub: PubSubServer, unique_name: Callable[[str], str], refusals: int
) -> None:
    topic = unique_name("orders")
    delivery = {"timeout": "10s", "maxAttempts": 5, "onExhausted": "Block", "backoff": SOON}
    orders = subscription("orders", pubsub_sink(pubsub.host, topic), partitions=2, delivery=delivery)
    written = events(400, 4)
    refused = written[201]
    with PubSubCollector(pubsub.host, topic) as collector:
        with psycopg.connect(outbox.url) as connection:
            for event in written:
                headers = json.dumps({"pstest-refusals": str(refusals)}) if event is refused else None
                connection.execute(
                    "insert into mailboat.outbox (event_id, event_type, key, payload, headers)"
                    " values (%s, 'order.placed', %s, %s, %s)",
                    [event.event_id, event.key, event.payload, headers],
                )
        committed = {event.event_id: event for event in written}
        async with serving(outbox_relay(outbox.url), orders):
            if refusals < 5:
                await _arrived(collector, 400)
            else:
                behind = [event for event in written[201:] if event.key == refused.key]
                await _arrived(collector, 400 - len(behind))
                await await_until(
                    lambda: outbox.execute("select attempts from mailboat.parked where blocked") == [(5,)],
                    what="the attempts to be used up",
                )
                committed = {i: event for i, event in committed.items() if event not in behind}
    check_delivery(committed, (), collector.arrivals, gapless=False)
    attempts = {arrival.event_id: arrival.attempt for arrival in collector.arrivals}
    assert attempts.get(refused.event_id, 3) == 3


async def test_attempts_never_exceed_their_limit(outbox: Database, stage: Stage) -> None:
    """Guarantee G4, with a sink that fails the whole batch and does not report which messages it refused."""
    seen: dict[str, int] = {}

    def refuse(message: Any) -> bool:
        if message.key in ("key 3", "key 7"):
            seen[message.event_id] = max(seen.get(message.event_id, 0), sequence_of(message.headers)[-1])
            return True
        return False

    orders = subscription("orders", STAGED, partitions=2, delivery={"timeout": "5s", "maxAttempts": 4, "backoff": SOON})
    committed = write(outbox.url, events(100, 10))
    async with serving(outbox_relay(outbox.url), orders):
        stage["orders"].refuse(refuse, tells_which=False)
        await await_until(
            lambda: outbox.execute("select count(*) from mailboat.dead_letters") == [(20,)],
            timeout=30,
            what="both keys to be given up, event by event",
        )
        assert outbox.execute("select min(attempts), max(attempts) from mailboat.dead_letters") == [(4, 4)]
        assert set(seen.values()) == {4}

        # All dead letters are replayed, and each key keeps its order.
        stage["orders"].refuse(None)
        later = write(outbox.url, events(10, 10, first=11))
        assert await admin_actions.replay(outbox) == 20
        await await_until(lambda: len(stage["orders"].arrived) == 110, what="the replay")
    sink = stage["orders"]
    assert len({message.event_id for message in sink.arrived}) == 110
    for key in ("key 3", "key 7"):
        replayed = [number for number in sink.numbers[key] if number < 11]
        assert replayed == list(range(1, 11))
    others = {i: event for i, event in (committed | later).items() if event.key not in ("key 3", "key 7")}
    check_delivery(others, (), [a for a in sink.arrivals if a.event_id in others], gapless=False)


def _limit(kafka: KafkaServer, topic: str, max_message_bytes: int) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    name, value = "max.message.bytes", str(max_message_bytes)
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(timeout=60)
    asked = ConfigResource(ResourceType.TOPIC, topic)
    wait_until(
        lambda: admin.describe_configs([asked])[asked].result(timeout=60)[name].value == value,
        what=f"{name} of {topic} to be {value}",
    )
