"""Consumers in the application's pods, and the status that kubectl prints for them."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import Any

from aiohttp import web

from mailboat_operator.kube.client import POD, SUBSCRIPTION
from mailboat_spec.names import CONSUMER_PORT_NAME, SUBSCRIPTION_LABEL
from support.manifests import consumed
from support.operator_under_test import Cluster, condition_of, operating

BILLING = consumed(namespace=None, idempotency={"redis": {"url": "redis://redis"}})


def _has_lag(lag: int, found: dict[str, Any]) -> bool:
    return bool(found["status"].get("lag") == lag)


class ConsumerStandIn:
    """A stub of a consumer's status endpoint, on its own loopback address."""

    def __init__(self, name: str) -> None:
        self.ip = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"
        self.report: dict[str, Any] = {
            "name": name,
            "state": "Running",
            "source": {"kind": "kafka", "reachable": True, "owned": 0, "partitions": []},
            "idempotency": {"kind": "redis", "reachable": True},
            "deadLetters": {"topic": "orders.billing.dead", "reachable": True},
            "aFieldOfANewerVersion": 1,
        }
        self._runner: web.AppRunner | None = None

    def owns(self, lags: dict[int, int]) -> None:
        partitions = [{"partition": number, "lag": lag, "oldestAge": 70} for number, lag in lags.items()]
        self.report |= {"lag": sum(lags.values()), "oldestAge": 70}
        self.report["source"] |= {"owned": len(lags), "partitions": partitions}

    async def start(self) -> int:
        async def status(_: web.Request) -> web.Response:
            return web.json_response({"consumers": [self.report]})

        application = web.Application()
        application.router.add_get("/status", status)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.ip, 0)
        await site.start()
        (address,) = self._runner.addresses
        return int(address[1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


async def run_consumer(cluster: Cluster, name: str) -> ConsumerStandIn:
    stand_in = ConsumerStandIn(f"{cluster.namespace}/billing")
    port = await stand_in.start()
    container = {
        "name": "application",
        "image": "application:1",
        "ports": [{"name": CONSUMER_PORT_NAME, "containerPort": port}],
    }
    metadata = {"name": name, "labels": {SUBSCRIPTION_LABEL: "billing"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
    await cluster.create(POD, pod)
    status = {"phase": "Running", "podIP": stand_in.ip, "podIPs": [{"ip": stand_in.ip}]}
    await cluster.kube.patch(POD, cluster.namespace, name, {"status": status}, "status")
    return stand_in


async def test_consumers_in_the_applications_pods_are_shown(cluster: Cluster) -> None:
    await cluster.create(SUBSCRIPTION, BILLING)
    async with operating(cluster):
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "Ready", "False", "NoConsumers")
        assert f"{SUBSCRIPTION_LABEL}" in condition_of(found, "Ready")["message"]
        first, second = [await run_consumer(cluster, name) for name in ("shop-a", "shop-b")]
        first.owns({0: 5, 2: 0})
        second.owns({1: 7})
        second.report |= {"handled": 40, "dead": 5, "parked": 3}
        second.report["deadLetters"] |= {"waiting": 2}  # three of the five were replayed
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "Ready", "True", "Consuming")
        found = await cluster.until(SUBSCRIPTION, "billing", lambda it: it["status"].get("lag") == 12, "the lag")
        status = found["status"]
        assert (status["source"], status["sink"], status["partitionCount"]) == ("kafka/orders", "pull", 3)
        assert (status["lagDisplay"], status["oldestAge"], status["parked"], status["dead"]) == ("12", "1m", 3, 2)
        assert {each["partition"]: each["pod"] for each in status["partitions"]} == {
            0: "shop-a",
            1: "shop-b",
            2: "shop-a",
        }

        first.report["idempotency"] = {"reachable": True, "doubt": "EvictsKeys", "doubtMessage": "set noeviction"}
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "IdempotencyReliable", "False", "EvictsKeys")
        assert condition_of(found, "IdempotencyReliable")["message"] == "set noeviction"
        assert condition_of(found, "Ready")["status"] == "True"
        first.report["source"] |= {"reachable": False, "error": "kafka:9092: connection refused"}
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "Ready", "False", "SourceUnavailable")
        assert "connection refused" in condition_of(found, "SourceReachable")["message"]
        first.report["source"] |= {"reachable": True}
        second.report["deadLetters"] |= {"stopped": True}
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "Ready", "False", "TooManyDeadLetters")
        assert condition_of(found, "DeadLettersStopped")["status"] == "True"
        assert condition_of(found, "Stalled")["status"] == "True"
        await first.stop()
        await second.stop()
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "Ready", "Unknown", "ConsumersSilent")
        assert found["status"]["lag"] == 12
    await first.stop()
    await second.stop()


EVS = """\
NAME          READY   SOURCE          SINK   PARTITIONS   LAG   OLDEST   DEAD   STATUS
billing       True    kafka/orders    pull   2            7     1m       0      Consuming
orders-view   True    outbox/orders   pull   4            5     1m       0      Delivering
"""


async def test_kubectl_shows_consumers_behind_a_broker_beside_those_on_the_outbox(cluster: Cluster) -> None:
    await cluster.create_relay()
    await cluster.create_subscription("orders-view", sink={"pull": {}})
    await cluster.create(SUBSCRIPTION, BILLING)
    view = f"{cluster.namespace}/orders-view"
    cluster.outbox.owners[view] = dict.fromkeys(range(4), f"{cluster.namespace}/orders-relay-a")
    cluster.outbox.lag[view] = {3: 5}
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        consumer = await run_consumer(cluster, "shop-a")
        consumer.owns({0: 7, 1: 0})
        for name, lag in (("orders-view", 5), ("billing", 7)):
            await cluster.until(SUBSCRIPTION, name, partial(_has_lag, lag), "the lag")
        table = await asyncio.to_thread(cluster.api.kubectl, "get", "evs", "--namespace", cluster.namespace)
        assert [line.split()[:-1] for line in table.splitlines()] == [line.split() for line in EVS.splitlines()]
    await consumer.stop()


async def test_a_pod_that_answers_nonsense_is_named(cluster: Cluster) -> None:
    await cluster.create(SUBSCRIPTION, BILLING)
    async with operating(cluster):
        consumer = await run_consumer(cluster, "shop-a")
        consumer.report["name"] = "shop/other"
        found = await cluster.until_condition(SUBSCRIPTION, "billing", "Ready", "Unknown", "ConsumersSilent")
        assert "shop-a: runs another consumer" in condition_of(found, "Ready")["message"]
        consumer.report = {"lag": "x" * 200_000}
        found = await cluster.until(
            SUBSCRIPTION, "billing", lambda it: "no status" in condition_of(it, "Ready")["message"], "the reason"
        )
    await consumer.stop()
