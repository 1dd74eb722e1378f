"""Consumer of a Kafka topic in a separate process, with ``consume`` as the target of the process.

The handler writes one effect per event: a line of the file ``effects``, or with the inbox a row of the table
``effects``. Dead letters are lines of the file ``dead``. The type of an event selects the behaviour of the handler:

| type | handler |
|---|---|
| ``lethal`` | ends the process |
| ``refused`` | refuses the event |
| ``frozen`` | stops the process (SIGSTOP) in the first attempt, before the effect |
| ``long`` | waits for ``long`` seconds |
| ``rude`` | blocks the event loop for ``long`` seconds |
| others | fail once if ``fails``, and wait up to ``dawdle`` seconds before and after the effect |

``store`` is none, bare, redis or inbox. ``die_at`` names a point of the engine, or ``effect``: in the handler, after
the effect. With ``armed_by``, the process dies at that point only after it has received an event of that key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from functools import partial
from typing import Any

import psycopg

from mailboat import Event
from mailboat.consumer import Refuse
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.engine import BrokerEngine, EngineSettings
from mailboat.consumer.broker.execution import PlainExecution
from mailboat.consumer.broker.interfaces import ClaimStore, DeadRecord, Execution, Original, Record
from mailboat.consumer.broker.kafka_client import consumer_settings
from mailboat.consumer.broker.kafka_source import KafkaSource
from mailboat.consumer.claims.inbox import InboxClaims, InboxExecution
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.handlers import handler
from mailboat.consumer.pull_statements import PullArguments
from mailboat.consumer.transactions import PsycopgAsync
from mailboat.delivery.backoff import Backoff
from support.bare_claims import BareClaims
from support.consumer_processes import Death, Lines, run_until_terminated

NAME = "faults/billing"
FAILS = 7
"""With ``fails``, the first attempt of every thirtieth event of a key fails, beginning with this number."""
SLOW = "Slow handler"
EFFECT = "insert into effects (key, number, attempt) values (%s, %s, %s)"


class DeadLetterFile:
    def __init__(self, path: str) -> None:
        self._lines = Lines(path)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def write(self, letter: DeadRecord) -> None:
        event = letter.record.event
        self._lines.add(reason=letter.refusal.reason, attempt=letter.attempts, **event.json())


class Handlers:
    """Handlers with and without the transaction of an inbox."""

    def __init__(self, orders: dict[str, Any], death: Death) -> None:
        self._orders = orders
        self._death = death
        self._effects = Lines(orders["effects"])
        self._chance = random.Random(os.getpid())

    async def plain(self, event: Event) -> None:
        await self._before(event)
        self._effects.add(**event.json(), attempt=event.attempt)
        await self._after()

    async def in_transaction(self, event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        await self._before(event)
        truth = event.json()
        await tx.execute(EFFECT, [truth["key"], truth["number"], event.attempt])
        await self._after()

    async def _before(self, event: Event) -> None:
        match event.type:
            case "lethal":
                os._exit(1)
            case "refused":
                raise Refuse("it can never be handled")
            case "frozen" if event.attempt == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "long":
                logging.info(SLOW)
                await asyncio.sleep(self._orders["long"])
            case "rude":
                logging.info(SLOW)
                time.sleep(self._orders["long"])  # noqa: ASYNC251
        if self._orders.get("fails", True) and event.attempt == 1 and event.json()["number"] % 30 == FAILS:
            raise RuntimeError("this attempt fails")
        await self._dawdle()

    async def _after(self) -> None:
        self._death.at("effect")
        await self._dawdle()

    async def _dawdle(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, self._orders.get("dawdle", 0.002)))


def memory_of(orders: dict[str, Any]) -> tuple[ClaimStore | None, Execution]:
    """Return claim store and execution."""
    own: dict[str, Any] = {"lease": orders.get("lease", 3.0), "instance": orders.get("instance")}
    match orders["store"]:
        case "none":
            return None, PlainExecution(8)
        case "bare":
            return BareClaims(orders["redis"], consumer=orders["group"]), PlainExecution(8)
        case "redis":
            own |= {"timeout": orders.get("timeout", 5.0), "check_every": orders.get("check_every", 60.0)}
            own |= {"replicas": orders.get("replicas", 0)}
            return RedisClaims(orders["redis"], consumer=orders["group"], **own), PlainExecution(8)
        case "inbox":
            arguments = PullArguments(NAME, None, None)
            execution = InboxExecution(lambda: PsycopgAsync.open(orders["postgres"], arguments), consumer=NAME)
            return InboxClaims(orders["postgres"], consumer=NAME, **own), execution
        case unknown:
            raise AssertionError(unknown)


def engine_of(orders: dict[str, Any]) -> BrokerEngine:
    armed_by = orders.get("armed_by")
    death = Death(orders.get("die_at"), orders.get("passage", 1), armed=armed_by is None)
    handlers = Handlers(orders, death)

    def decode_and_arm(original: Original) -> Record:
        record = decode(original)
        death.armed = death.armed or record.event.key == armed_by
        return record

    dispatcher = Dispatcher(NAME)
    dispatcher.add(handler("*", handlers.in_transaction if orders["store"] == "inbox" else handlers.plain))
    client = consumer_settings(
        [orders["bootstrap"]], {}, {}, subscription=NAME, group=orders["group"], group_protocol=orders["protocol"]
    )
    if orders["protocol"] == "classic":
        client |= {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    if "instance" in orders:  # a static member: the next process does not wait for the end of the session
        client |= {"group.instance.id": orders["instance"]}
    claims, execution = memory_of(orders)
    return BrokerEngine(
        dispatcher,
        KafkaSource(client, orders["topic"], decode_and_arm, consumer=NAME, passing=death),
        claims,
        execution,
        DeadLetterFile(orders["dead"]),
        EngineSettings(
            consumer=NAME,
            concurrency=orders.get("concurrency", 8),
            max_attempts=orders.get("max_attempts", 1000),
            backoff=Backoff(initial=0.02, factor=1, ceiling=0.02, jitter=0),
        ),
        passing=death,
    )


consume = partial(run_until_terminated, engine_of)
"""Handle events until SIGTERM."""
