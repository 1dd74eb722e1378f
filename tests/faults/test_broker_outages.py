"""Kafka consumers during outages: Redis or the broker is unavailable, or the consumer is frozen or blocked.

An outage costs no attempt: every effect happens once, in the attempt that its handler chose (C2, C4, C5, C7).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from mailboat.consumer.broker.interfaces import Busy, Claim, ClaimReply, Finished
from mailboat_devservers.kafka import KafkaServer, start_kfake
from mailboat_devservers.redis_server import RedisServer, start_sentinel, start_valkey
from support.broker_consumer_main import SLOW, memory_of
from support.kafka_consumers import HANDLERS, PARTITIONS, Consumers
from support.wait import await_until, wait_until

OrSkip = Callable[[Callable[[], Any]], Any]
ON_DISK = {"appendonly": "yes", "appendfsync": "no"}  # writes survive SIGKILL


@dataclass(frozen=True)
class Outage:
    """The servers of a test, and the calls that begin and end the outage of one of them."""

    begin: Callable[[], object]
    end: Callable[[], object]
    redis: str
    kafka: KafkaServer | None = None
    """The broker that becomes unavailable; None if the broker stays available."""
    log: str = "Claim store unavailable: Redis at "


class Servers:
    """Start servers that belong to one test, and stop them after it."""

    def __init__(self, folder: Path, or_skip: OrSkip) -> None:
        self._folder = folder
        self._or_skip = or_skip
        self.stack = ExitStack()

    def redis(self, name: str = "redis", **options: str) -> RedisServer:
        folder = self._folder / name
        named = {option.replace("_", "-"): value for option, value in options.items()}
        server: RedisServer = self._or_skip(lambda: start_valkey(folder, options=named))
        return self.stack.enter_context(server)

    def killed(self) -> Outage:
        server = self.redis(**ON_DISK)
        return Outage(server.kill, server.launch, server.url)

    def hung(self) -> Outage:
        server = self.redis()
        return Outage(server.suspend, server.resume, server.url)

    def emptied(self) -> Outage:
        server = self.redis()
        return Outage(server.kill, server.launch, server.url)

    def full(self) -> Outage:
        server = self.redis(maxmemory_policy="noeviction")
        client = server.client()
        return Outage(lambda: client.config_set("maxmemory", 1), lambda: client.config_set("maxmemory", 0), server.url)

    def failed_over(self) -> Outage:
        """Return an outage of the primary. The sentinel promotes the replica one second after its death."""
        primary = self.redis("primary")
        replica = self.redis("replica", replicaof=f"127.0.0.1 {primary.port}")
        sentinel = self.stack.enter_context(start_sentinel(self._folder / "sentinel", primary))
        wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
        wait_until(lambda: int(sentinel.client().info("sentinel")["master0"]["slaves"]) == 1)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        return Outage(
            primary.kill, lambda: wait_until(lambda: _is_primary(replica)), url, log="Claim store unavailable"
        )

    def broker(self) -> Outage:
        kafka: KafkaServer = self.stack.enter_context(self._or_skip(lambda: start_kfake(self._folder / "kafka")))
        redis = self.redis()
        return Outage(kafka.kill, kafka.launch, redis.url, kafka, log="Kafka unavailable")


def _is_primary(server: RedisServer) -> bool:
    return bool(server.client().info("replication")["role"] == "master")


@pytest.fixture
def own_servers(tmp_path: Path, or_skip: OrSkip) -> Iterator[Servers]:
    servers = Servers(tmp_path, or_skip)
    with servers.stack:
        yield servers


def short_and(kind: Callable[[Servers], Outage], seconds: int) -> list[Any]:
    """Return two parameters: two seconds for the gate, the whole duration for ``make verify``."""
    return [pytest.param(kind, 2), pytest.param(kind, seconds, marks=pytest.mark.verify)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        *short_and(Servers.killed, 20),
        *short_and(Servers.broker, 60),
        pytest.param(Servers.hung, 20, marks=pytest.mark.verify),
        pytest.param(Servers.emptied, 2, marks=pytest.mark.verify),
        pytest.param(Servers.full, 2, marks=pytest.mark.verify),
        pytest.param(Servers.failed_over, 0, marks=pytest.mark.verify),
    ],
)
def test_an_outage_costs_no_attempt_and_no_effect(
    own_servers: Servers,
    kfake: KafkaServer,
    kind: Callable[[Servers], Outage],
    seconds: int,
    tmp_path: Path,
    unique_name: Callable[[str], str],
) -> None:
    outage = kind(own_servers)
    kafka, topic = outage.kafka or kfake, unique_name("topic")
    kafka.create_topic(topic, PARTITIONS)
    orders: dict[str, Any] = {
        "topic": topic,
        "group": unique_name("group"),
        "redis": outage.redis,
        "timeout": 1.0,
        "dawdle": 0.01,
    }
    with Consumers(kafka, tmp_path, **orders) as consumers:
        both = [consumers.start() for _ in range(2)]
        # A rebalance during an outage of the claim store may repeat an effect (docs/idempotency.md).
        wait_until(lambda: all(map(consumers.has_partitions, both)), what="both consumers to have partitions")
        keys = [f"key-{number % 50}" for number in range(400)]
        consumers.feed.send(keys)
        wait_until(lambda: len(consumers.effects()) > 100, what="some events")
        outage.begin()
        wait_until(lambda: outage.log in consumers.log(), what="the outage to be reported")
        if outage.kafka is None and seconds:
            handled = len(consumers.effects())
            consumers.feed.send(keys)
            time.sleep(seconds)  # the outage itself, not a wait for a condition
            assert len(consumers.effects()) <= handled + 2 * HANDLERS, "events were handled without their claims"
        else:
            time.sleep(seconds)  # the outage itself
        outage.end()
        consumers.settle(timeout=240)
        consumers.stop(*both)
        consumers.check_attempts()
        assert not consumers.letters()


@pytest.mark.verify
@pytest.mark.parametrize("policy", ["volatile-ttl", "volatile-lru", "allkeys-lru", "allkeys-random"])
def test_a_full_server_that_evicts_loses_nothing(own_servers: Servers, consumers: Consumers, policy: str) -> None:
    server = own_servers.redis(maxmemory="8mb", maxmemory_policy=policy)
    client = server.client()
    while not client.info("stats")["evicted_keys"]:
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(50):
                pipeline.set(os.urandom(8).hex(), "x" * 10_000, ex=3600)
            pipeline.execute()
    evicted = client.info("stats")["evicted_keys"]
    process = consumers.start(redis=server.url, check_every=0)
    consumers.feed.send(f"key-{number % 50}" for number in range(5000))
    consumers.settle()
    consumers.stop(process)
    assert client.info("stats")["evicted_keys"] > evicted
    assert "Claims are not reliable: maxmemory-policy is " + policy in consumers.log()
    consumers.check_attempts()


@pytest.mark.verify
def test_events_that_an_empty_redis_forgot_run_again_if_they_are_delivered_again(
    own_servers: Servers, consumers: Consumers
) -> None:
    server = own_servers.redis()
    orders = {"instance": "pod-1", "redis": server.url, "fails": False, "check_every": 0, "lease": 0.6}
    process = consumers.start(**orders, long=600)
    consumers.feed.send(f"key-{number % 5}" for number in range(50))
    consumers.feed.send(["slow"], event_type="long", partition=0)
    consumers.feed.send((f"behind-{number}" for number in range(10)), partition=0)
    wait_until(lambda: len(consumers.effects()) >= 60, what="everything but the slow event")
    server.kill()
    server.launch()
    wait_until(lambda: "Claims are not reliable: Redis lost keys" in consumers.log(), what="the loss to be noticed")
    process.kill()
    process.join()
    last = consumers.start(**orders, long=0)
    consumers.settle()
    consumers.stop(last)
    again = {effect for effect, attempt in consumers.effects()[60:]}
    assert not consumers.lost()
    assert again >= {(f"behind-{number}", 1) for number in range(10)}, "marks are lost, and offsets were not committed"
    assert (("slow", 1), 2) in consumers.effects(), "the claim of a running event was made again, so the death counts"


# -- frozen and blocked -----------------------------------------------------------------------------------------------


@pytest.mark.verify  # the shortest session timeout of a broker is 6 s
@pytest.mark.parametrize(("consumers", "attempts"), [("redis", [2, 1]), ("inbox", [1])], indirect=["consumers"])
def test_a_process_that_is_frozen_past_its_lease(consumers: Consumers, attempts: list[int]) -> None:
    """With Redis, another consumer takes over and the frozen consumer repeats the effect after it resumes.

    With the inbox, the other consumer waits for the frozen one.
    """
    orders = {"lease": 1.0, "fails": False}
    frozen = consumers.start(**orders)
    consumers.feed.send(["cold"], event_type="frozen")
    process = psutil.Process(frozen.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, what="the process to freeze")
    awake = consumers.start(**orders)
    consumers.feed.send(f"key-{number % 50}" for number in range(200))
    if len(attempts) == 1:
        wait_until(lambda: len(consumers.effects()) == 200, what="all other keys")
    else:
        consumers.settle()
    os.kill(frozen.pid, signal.SIGCONT)
    wait_until(lambda: [a for (key, _), a in consumers.effects() if key == "cold"] == attempts, what="the cold event")
    consumers.settle()
    consumers.stop(frozen, awake)
    assert [attempt for (key, _), attempt in consumers.effects() if key == "cold"] == attempts
    others = [effect for effect, _ in consumers.effects() if effect[0] != "cold"]
    assert sorted(others) == sorted(consumers.feed.sent[1:])
    if len(attempts) == 2:
        assert "Claim was lost while the event was handled" in consumers.log()


async def claimed_by_another(consumers: Consumers, event_id: str) -> list[ClaimReply]:
    """Claim an event as another process of the group until it is done, and return the answers."""
    store, _ = memory_of({**consumers.orders, "instance": "another"})
    assert store is not None
    await store.open()
    replies: list[ClaimReply] = []

    async def finished() -> bool:
        replies.extend(await store.claim([Claim(event_id)]))
        return not isinstance(replies[-1], Busy)

    await await_until(finished, what="the end of the handler")
    await store.close()
    return replies


@pytest.mark.verify
@pytest.mark.parametrize("consumers", ["redis", "inbox"], indirect=True)
@pytest.mark.parametrize("kind", ["long", "rude"])
async def test_a_handler_of_three_leases_keeps_its_claim(consumers: Consumers, kind: str) -> None:
    """Handlers that run longer than their lease. ``rude`` calls time.sleep in an asynchronous handler.

    Other consumers of the group never acquire the claim of the event.
    """
    orders = {"lease": 2.0, "long": 6.5, "fails": False}
    first = consumers.start(**orders)
    consumers.feed.send(["slow"], event_type=kind)
    consumers.feed.send(["slow", *(f"key-{number}" for number in range(50))])
    wait_until(lambda: SLOW in consumers.log(), what="the handler")
    others = [consumers.start(**orders) for _ in range(2)]  # each triggers a rebalance while the handler runs
    replies = await claimed_by_another(consumers, consumers.feed.ids[0])
    assert replies[-1] == Finished(), "the claim expired while the handler ran"
    assert len(replies) > 10
    await asyncio.to_thread(consumers.settle)
    consumers.stop(first, *others)
    consumers.check_attempts()
    assert "Claim was lost" not in consumers.log()
    assert ("Event loop blocked" in consumers.log()) == (kind == "rude")
