"""A relay reports a missing dead-letter topic at its start, not at the first dead letter."""

from __future__ import annotations

from collections.abc import Callable

from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from mailboat_devservers.pubsub import PubSubServer
from support.collectors import PubSubCollector
from support.inprocess_relay import serving, status_of
from support.manifests import event_subscription, kafka_sink, outbox_relay_on, pubsub_sink
from support.wait import await_until


async def test_a_missing_dead_letter_topic_is_reported_until_it_exists(
    outbox: Database, kfake: KafkaServer, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("orders")
    kfake.create_topic(topic, 1)
    delivery = {"deadLetter": {"topic": f"{topic}.dead"}}
    manifest = event_subscription("orders", kafka_sink(kfake.bootstrap, topic), delivery=delivery)
    async with serving(outbox_relay_on(outbox.url), manifest) as relay:
        await await_until(lambda: status_of(relay, "orders").last_error is not None, timeout=60, what="the report")
        status = status_of(relay, "orders")
        assert f"the dead-letter topic {topic}.dead is not available" in (status.last_error or "")
        assert (status.last_error or "").endswith("create it, or correct spec.delivery.deadLetter.topic")
        assert status.sink_reachable is True, "delivery waits for the dead-letter topic"
        kfake.create_topic(f"{topic}.dead", 1)
        await await_until(lambda: status_of(relay, "orders").last_error is None, timeout=90, what="the end of it")


async def test_a_missing_dead_letter_topic_of_pubsub_is_reported(
    outbox: Database, pubsub: PubSubServer, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("orders")
    with PubSubCollector(pubsub.host, topic):  # creates the topic
        delivery = {"deadLetter": {"topic": f"{topic}-dead"}}
        manifest = event_subscription("orders", pubsub_sink(pubsub.host, topic), delivery=delivery)
        async with serving(outbox_relay_on(outbox.url), manifest) as relay:
            await await_until(lambda: status_of(relay, "orders").last_error is not None, timeout=60, what="the report")
            last_error = status_of(relay, "orders").last_error or ""
            assert f"the dead-letter topic {topic}-dead" in last_error
            assert last_error.endswith("create it, or correct spec.delivery.deadLetter.topic")
