"""Pub/Sub consumer process for tests that kill it, with ``consume`` as the target of the process.

The handler appends a line per event to a file that all consumers share, and fails the first attempt of every thirtieth
event of a key. ``die_at`` names the point of the engine at which the process kills itself.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from typing import Any

from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.engine import BrokerEngine, EngineSettings
from mailboat.consumer.broker.execution import PlainExecution
from mailboat.consumer.broker.pubsub_keys import Bounds
from mailboat.consumer.broker.pubsub_source import PubSubSettings, PubSubSource
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import handler
from mailboat.consumer.received_event import Event
from mailboat.delivery.backoff import Backoff
from mailboat.sinks.pubsub.channel import PubSubEndpoint
from support.consumer_processes import Death, run_until_terminated

LEASE = 2


def engine_of(orders: dict[str, Any]) -> BrokerEngine:
    effects = os.open(orders["effects"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    passing = Death(orders.get("die_at"), orders.get("passage", 1))

    async def handle(event: Event) -> None:
        if event.attempt == 1 and event.json()["number"] % 30 == 7:
            raise RuntimeError("the first attempt fails")
        await asyncio.sleep(random.random() * 0.01)
        os.write(effects, (event.payload or b"") + b"\n")
        await asyncio.sleep(random.random() * 0.01)

    dispatcher = Dispatcher(orders["consumer"])
    dispatcher.add(handler("*", handle))
    settings = PubSubSettings(
        project="acme",
        subscription="orders",
        destination=PubSubEndpoint(orders["host"], plain=True),
        bounds=Bounds(max_messages=100, longest_tail=5, stuck_after=0.2),
        lease=LEASE,
        max_hold=orders.get("max_hold", 1.0),
        drain=5.0,
    )
    return BrokerEngine(
        dispatcher,
        PubSubSource(settings, decode, passing),
        RedisClaims(orders["redis"], consumer=orders["consumer"], lease=LEASE),
        PlainExecution(8),
        None,
        EngineSettings(
            consumer=orders["consumer"],
            concurrency=16,
            max_attempts=1000,
            backoff=Backoff(initial=0.05, factor=2, ceiling=0.5, jitter=0.5),
        ),
        passing=passing,
    )


consume = partial(run_until_terminated, engine_of)
"""Handle events until SIGTERM. ``orders``: host, redis, consumer, effects, log."""
