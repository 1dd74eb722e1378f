"""Assignment of partitions to relays, and the status that reports it, on a real API server."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import Counter

import pytest

from mailboat_operator.controller import controller
from mailboat_operator.kube.client import DEPLOYMENT, POD, RELAY, SUBSCRIPTION
from mailboat_operator.kube.errors import Conflict
from mailboat_operator.relays.state import RelayStates
from mailboat_spec.names import API_VERSION
from support.operator_under_test import condition_of, holders, operating, spread
from support.wait import await_until


async def test_partitions_are_shared_out_and_the_status_shows_it(cluster, orders):
    async with operating(cluster):
        first = await cluster.run_pod("orders-relay-a")
        second = await cluster.run_pod("orders-relay-b")
        name = f"{cluster.namespace}/orders-to-kafka"
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True", "Delivering")
        found = await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2), "an equal share")
        owners = {number: f"{cluster.namespace}/{pod}" for number, pod in holders(found).items()}
        assert cluster.outbox.owners[name] == owners
        assert (first.refused, second.refused) == ([], [])

        cluster.outbox.lag[name] = {0: 5, 1: 7}
        found = await cluster.until(
            SUBSCRIPTION, "orders-to-kafka", lambda found: found["status"].get("lag") == 12, "the lag"
        )
        assert found["status"]["lagDisplay"] == "12"
        assert found["status"]["oldestAge"] == "1m"
        cluster.outbox.lag[name] = {0: 100_000, 1: 2_345}
        found = await cluster.until(SUBSCRIPTION, "orders-to-kafka", lambda it: it["status"]["lag"] > 99_999, "more")
        assert (found["status"]["lag"], found["status"]["lagDisplay"]) == (100_000, "100000+")
        relay = await cluster.until_condition(RELAY, "orders", "Ready", "True", "Available")
        assert relay["status"]["readyReplicas"] == relay["status"]["replicas"] == 2
        assert relay["status"]["subscriptions"] == 1
        assert relay["status"]["selector"].endswith("app.kubernetes.io/instance=orders")


async def test_a_started_or_stopped_relay_moves_as_few_partitions_as_possible(cluster):
    await cluster.create_relay()
    await cluster.create_subscription(partitions=6)
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        await cluster.run_pod("orders-relay-b")
        before = holders(await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(3, 3), "3 and 3"))
        await cluster.run_pod("orders-relay-c")
        after = holders(await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2, 2), "2 each"))
        assert sum(before[number] != after[number] for number in before) == 2
        assert {after[number] for number in before if before[number] != after[number]} == {"orders-relay-c"}
        await cluster.remove_pod("orders-relay-c")
        last = holders(await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(3, 3), "3 and 3 again"))
        assert all(last[number] == after[number] for number in after if after[number] != "orders-relay-c")


async def test_a_subscription_is_not_ready_before_its_destination_answered(cluster, orders):
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        relay.sink_reachable = None
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "Unknown", "Connecting")
        assert condition_of(found, "SinkReachable")["status"] == "Unknown"
        relay.sink_reachable = True
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True", "Delivering")


async def test_a_relay_that_is_silent_for_a_moment_is_named_and_keeps_its_partitions(cluster, monkeypatch):
    now = 0.0  # the clock stands still, so that the silence stays short on a slow machine
    monkeypatch.setattr(controller, "RelayStates", functools.partial(RelayStates, clock=lambda: now))
    await cluster.create_relay()
    await cluster.create_subscription()
    async with operating(cluster):
        first = await cluster.run_pod("orders-relay-a")
        second = await cluster.run_pod("orders-relay-b")
        await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2), "2 and 2")
        pushes = cluster.outbox.assignments
        await second.stop()
        polls = first.polls
        await await_until(lambda: first.polls > polls + 3, what="a few looks")
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "RelaySilent")
        assert "orders-relay-b: can't be connected to" in condition_of(found, "Ready")["message"]
        first.silent, name = [second.id], f"{cluster.namespace}/orders-to-kafka"
        cluster.outbox.lag[name] = dict.fromkeys(range(4), 10)
        await cluster.until(SUBSCRIPTION, "orders-to-kafka", lambda it: it["status"].get("lagDisplay") == "40", "40")
        assert cluster.outbox.assignments == pushes
        await second.start()
        first.silent, polls = [], first.polls
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True", "Delivering")
        await await_until(lambda: first.polls > polls + 6, what="a few more looks")
        assert cluster.outbox.assignments == pushes
        await second.stop()
        polls = first.polls
        await await_until(lambda: first.polls > polls + 2, what="the end of a look that the second has answered")
        now = 60.0
        found = await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(4), "all at the one that answers")
        assert set(holders(found).values()) == {"orders-relay-a"}


async def test_a_failure_is_reported_with_an_event_and_clears_itself(cluster, orders):
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        await cluster.run_pod("orders-relay-b")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")

        relay.sink_reachable = False
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "SinkUnavailable")
        assert "broker: connection refused" in condition_of(found, "SinkReachable")["message"]
        assert found["status"]["lastError"] == "broker: connection refused"
        relay.sink_reachable = True
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")

        cluster.outbox.reachable = False
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "DatabaseUnreachable")
        found = await cluster.until_condition(RELAY, "orders", "DatabaseReachable", "False", "DatabaseUnreachable")
        assert "connection refused" in condition_of(found, "Ready")["message"]
        cluster.outbox.reachable = True
        await cluster.until_condition(RELAY, "orders", "Ready", "True")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")

        reasons = Counter(reason for _, reason, _ in await cluster.events("orders-to-kafka"))
        assert reasons["SinkUnavailable"] == reasons["DatabaseUnreachable"] == 1


async def test_a_pause_is_ready_and_one_by_command_is_not(cluster):
    await cluster.create_relay()
    await cluster.create_subscription(state="Paused")
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True", "PausedBySpec")
        assert condition_of(found, "Paused")["status"] == "True"
        await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"state": "Running"}})
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True", "Delivering")
        relay.paused.add(f"{cluster.namespace}/orders-to-kafka")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "PausedByCommand")


async def test_one_subscription_that_fails_keeps_no_other_from_being_delivered(cluster):
    await cluster.create_relay()
    await cluster.create_subscription("good")
    await cluster.create_subscription("bad", sink={"custom": {"type": "nats"}})
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        relay.failed[f"{cluster.namespace}/bad"] = 'no installed package offers a sink "nats"'
        found = await cluster.until_condition(SUBSCRIPTION, "bad", "Ready", "False", "SinkNotSupported")
        assert condition_of(found, "Ready")["message"] == 'no installed package offers a sink "nats"'
        await cluster.until_condition(SUBSCRIPTION, "good", "Ready", "True")


async def test_a_relay_that_can_not_build_a_subscription_gets_none_of_its_partitions(cluster, orders):
    async with operating(cluster):
        broken = await cluster.run_pod("orders-relay-a", answering=False)
        broken.failed[f"{cluster.namespace}/orders-to-kafka"] = "its file of certificates can't be read"
        await broken.start()
        works = await cluster.run_pod("orders-relay-b")

        def all_there(found):
            return set(holders(found).values()) == {"orders-relay-b"}

        await cluster.until(SUBSCRIPTION, "orders-to-kafka", all_there, "all to be at the one that can")
        assignments, polls = cluster.outbox.assignments, works.polls
        await await_until(lambda: works.polls > polls + 25, timeout=60, what="more looks than relays get to follow in")
        assert cluster.outbox.assignments == assignments, "nobody is told again and again"


async def test_an_autoscaler_reads_how_many_there_are_and_which_pods_they_are(api, cluster):
    path = f"/apis/{API_VERSION}/namespaces/{cluster.namespace}/outboxrelays/orders/scale"
    await cluster.create_relay(replicas=1)
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        await cluster.until(RELAY, "orders", lambda it: it["status"].get("replicas") == 1, "the pod to be counted")
        scale = json.loads(await asyncio.to_thread(api.kubectl, "get", "--raw", path))
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)
        listed = await cluster.kube.list(POD, cluster.namespace, scale["status"]["selector"])
        assert [each["metadata"]["name"] for each in listed.items] == ["orders-relay-a"]

        resize = ("scale", "outboxrelay", "orders", "--replicas=3", "--namespace", cluster.namespace)
        await asyncio.to_thread(api.kubectl, *resize)
        await cluster.until(DEPLOYMENT, "orders-relay", lambda it: it["spec"]["replicas"] == 3, "three replicas")

        # Without spec.replicas the scale subresource fails, so examples/kubernetes/autoscaling.yaml keeps the field.
        await cluster.patch(RELAY, "orders", {"spec": {"replicas": None}})
        await cluster.until(DEPLOYMENT, "orders-relay", lambda it: it["spec"]["replicas"] == 2, "the default")
        answer = await asyncio.to_thread(api.try_kubectl, "get", "--raw", path)
        assert (answer.status != 0, ".spec.replicas" in answer.err) == (True, True), answer


async def test_partitions_are_shared_out_also_after_an_operator_whose_clock_was_ahead(cluster):
    ahead = 3_600_000
    cluster.outbox.generation = int(time.time() * 1000) + ahead
    await cluster.create_relay()
    await cluster.create_subscription()
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        await cluster.run_pod("orders-relay-b")
        await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2), "2 and 2")
    beyond = cluster.outbox.generation - int(time.time() * 1000)
    assert beyond < 3 * ahead, "a relay that refuses is asked once, and no other in its place"


async def test_a_status_is_never_written_onto_a_newer_version(cluster):
    await cluster.create_relay()
    before = await cluster.create_subscription()
    await cluster.delete(SUBSCRIPTION, "orders-to-kafka")
    await cluster.create_subscription()
    with pytest.raises(Conflict):
        await cluster.kube.patch_status(SUBSCRIPTION, before, {"dead": 100})
    assert "status" not in await cluster.get(SUBSCRIPTION, "orders-to-kafka")


async def test_a_report_of_another_relay_at_the_same_address_is_ignored(cluster, orders):
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        second = await cluster.run_pod("orders-relay-b")
        await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2), "2 and 2")
        second.pod = "somebody-else"
        found = await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(4), "all at the one that is there")
        assert set(holders(found).values()) == {"orders-relay-a"}
