"""docs/consumers.md: its manifests behave as the page describes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import yaml

from mailboat import emit, migrate
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from support.collectors import KafkaCollector
from support.inprocess_relay import serving, status_of
from support.manifests import outbox_relay_on
from support.markdown import blocks
from support.pull_consumers import Puller
from support.wait import await_until

PAGE = (Path(__file__).parents[2] / "docs" / "consumers.md").read_text(encoding="utf-8")


async def test_a_dead_letter_of_a_consumer_reaches_a_topic(
    database: Database, kfake: KafkaServer, unique_name: Callable[[str], str]
) -> None:
    pulled, carried = yaml.safe_load_all(blocks(PAGE, "yaml")[1])
    topic = unique_name("orders-view.dead")
    kfake.create_topic(topic, 1)
    carried["spec"]["sink"]["kafka"] |= {"bootstrapServers": [kfake.bootstrap], "topic": topic}
    await asyncio.to_thread(migrate, database.url)
    relay = outbox_relay_on(database.url, name="orders", namespace="shop")
    with KafkaCollector(kfake.bootstrap, topic) as collector:
        async with serving(relay, pulled, carried, timings=None) as running:
            declared = "select count(*) from mailboat.pull_policies"
            await await_until(lambda: database.execute(declared) == [(1,)], what="the subscription to be declared")
            event_id = await asyncio.to_thread(_refuse_one, database.url)
            await await_until(lambda: collector.arrivals, timeout=60, what="the dead letter on the topic")
            await await_until(lambda: status_of(running, "orders-view").dead == 1, what="the relay to count it")
            assert status_of(running, "orders-view").lag == 0
    [arrival] = collector.arrivals
    document = json.loads(arrival.payload or b"")
    shown = json.loads(blocks(PAGE, "json")[0])
    assert (document.keys(), document["originalEvent"].keys()) == (shown.keys(), shown["originalEvent"].keys())
    assert (document["originalEvent"]["id"], document["reason"], document["error"]) == (event_id, "Refused", "never")
    assert arrival.key == "o-1"


def _refuse_one(url: str) -> str:
    consumer = Puller(url, name="shop/orders-view")
    try:
        event_id = emit(consumer.connection, "order.placed", {"total": 1}, key="o-1")
        consumer.connection.commit()
        (event,) = consumer.pull()
        consumer.refuse(event, "never", reason="Refused", final=True)
        assert consumer.take_all() == []
        return str(event_id)
    finally:
        consumer.close()
