"""A consumer of a Kafka topic as a process of its own, for tests that kill it.

    python -m support.broker_consumer_main '{"bootstrap": ..., "topic": ..., "die_at": "handled", "passage": 3}'

Its handler appends each event to the file ``effects``, fails now and then, and dies of events of type ``lethal``. Dead
letters are appended to the file ``dead``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
from typing import Any

from mailboat import Event
from mailboat.consumer import Refuse
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.engine import BrokerEngine, EngineSettings
from mailboat.consumer.broker.execution import PlainExecution
from mailboat.consumer.broker.kafka import KafkaSource
from mailboat.consumer.broker.kafka_client import consumer_settings
from mailboat.consumer.broker.protocol import BrokerPoint, DeadLetter, PassingPoint
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import handler
from mailboat.pump.retry import Backoff

NAME = "faults/billing"


def dying_at(point: str | None, passage: int) -> PassingPoint:
    left = passage

    def passing(passed: BrokerPoint) -> None:
        nonlocal left
        if passed.value == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return passing


class Lines:
    """A file that survives the process: each line is one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, **fields: Any) -> None:
        os.write(self._file, json.dumps({**fields, "pid": os.getpid()}).encode() + b"\n")


class DeadLetterFile:
    def __init__(self, path: str) -> None:
        self._lines = Lines(path)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def write(self, letter: DeadLetter) -> None:
        event = letter.record.event
        self._lines.add(reason=letter.refusal.reason, attempts=letter.attempts, **event.json())


async def run(orders: dict[str, Any]) -> None:
    effects, chance = Lines(orders["effects"]), random.Random(os.getpid())
    passing = dying_at(orders.get("die_at"), orders.get("passage", 1))

    async def handle(event: Event) -> None:
        truth = event.json()
        await asyncio.sleep(chance.uniform(0, orders.get("dawdle", 0.002)))
        if event.type == "lethal":
            os._exit(1)
        if event.type == "refused":
            raise Refuse("it can never be handled")
        if event.attempt == 1 and truth["number"] % 30 == 7:
            raise RuntimeError("this attempt fails")
        effects.add(**truth)
        await asyncio.sleep(chance.uniform(0, orders.get("dawdle", 0.002)))

    dispatcher = Dispatcher(NAME)
    dispatcher.add(handler("*", handle))
    client = consumer_settings(
        [orders["bootstrap"]], {}, {}, subscription=NAME, group=orders["group"], group_protocol=orders["protocol"]
    )
    if orders["protocol"] == "classic":
        client |= {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    if "instance" in orders:  # a static member: its successor need not wait for the end of the session
        client |= {"group.instance.id": orders["instance"]}
    url = orders.get("redis")
    claims = None
    if url is not None:
        claims = RedisClaims(
            url, consumer=orders["group"], lease=orders.get("lease", 3.0), instance=orders.get("instance")
        )
    engine = BrokerEngine(
        dispatcher,
        KafkaSource(client, orders["topic"], decode, consumer=NAME, passing=passing),
        claims,
        PlainExecution(8),
        DeadLetterFile(orders["dead"]),
        EngineSettings(
            consumer=NAME,
            concurrency=orders.get("concurrency", 8),
            max_attempts=orders.get("max_attempts", 1000),
            backoff=Backoff(initial=0.02, factor=1, ceiling=0.02, jitter=0),
        ),
        passing=passing,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    logging.info("started")
    await engine.run(stop)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(name)s %(message)s")
    asyncio.run(run(json.loads(sys.argv[1])))
