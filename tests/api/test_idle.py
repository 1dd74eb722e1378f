"""In an idle cluster the operator sends only reads to the API server (G8)."""

from __future__ import annotations

import asyncio
import time

import pytest

from mailboat_operator.kube.client import CONFIG_MAP, MUTATING_WEBHOOK, RELAY, SUBSCRIPTION
from mailboat_operator.resources.pod import KEYS_KEY
from support.operator_processes import RunningOperator, webhook_configuration
from support.wait import await_until

MINUTE = 60.0
POLLS = 12
"""Polls of a relay per minute at the default interval."""


async def settled(cluster, relay):
    for name in ("a", "b"):
        await cluster.until_condition(SUBSCRIPTION, name, "Ready", "True")
    await cluster.until(SUBSCRIPTION, "a", lambda found: found["status"].get("lag") == 3, "the lag")
    await cluster.until_condition(RELAY, "orders", "Ready", "True")
    polls = relay.polls
    await await_until(lambda: relay.polls > polls + 4, timeout=120, what="all to be settled")


async def writes_of_a_minute(api, relay, user):
    mark, polls = api.bookmark(), relay.polls
    over = time.monotonic() + MINUTE
    await await_until(
        lambda: time.monotonic() > over and relay.polls > polls + POLLS, timeout=2 * MINUTE, what="a minute"
    )
    made = api.requests(user=user, after=mark)
    return [each for each in made if each.verb not in ("get", "list", "watch")]


@pytest.mark.verify
@pytest.mark.timeout(600)
async def test_the_whole_process_writes_its_lease_and_nothing_else(api, cluster, tmp_path):
    """Includes the periodic work of the process: certificates, the caBundle, signing keys."""
    user = f"whole-{cluster.namespace}"
    kubeconfig = await asyncio.to_thread(api.kubeconfig_for, user, ("system:masters",))
    await cluster.create_relay()
    for name in ("a", "b"):
        await cluster.create_subscription(name)
    cluster.outbox.lag[f"{cluster.namespace}/a"] = {0: 3}  # idle as well: the displayed age changes in steps
    operator = RunningOperator(tmp_path, "whole", kubeconfig, cluster.namespace, "--status-interval=5s")
    try:
        address = await asyncio.to_thread(operator.address, "webhook")
        await cluster.kube.create(MUTATING_WEBHOOK, webhook_configuration(cluster.namespace, address))
        found = await cluster.until(CONFIG_MAP, "orders-relay", bool, "the configuration", timeout=60)
        cluster.trust(found["data"][KEYS_KEY])
        relay = await cluster.run_pod("orders-relay-a")
        await cluster.run_pod("orders-relay-b")
        await settled(cluster, relay)
        await asyncio.to_thread(operator.wait_ready)

        async def published():
            found = await cluster.kube.get(MUTATING_WEBHOOK, None, cluster.namespace)
            return "caBundle" in found["webhooks"][0]["clientConfig"]

        await await_until(published, timeout=60, what="the caBundle")
        made = await writes_of_a_minute(api, relay, user)
        assert {(each.verb, each.resource) for each in made} == {("update", "leases")}
    finally:
        await asyncio.to_thread(operator.end)
        await cluster.kube.delete(MUTATING_WEBHOOK, None, cluster.namespace)
