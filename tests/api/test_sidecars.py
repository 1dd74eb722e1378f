"""Relays as sidecars in the application's pods, on a real API server."""

from __future__ import annotations

import pytest

from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    RELAY,
    SERVICE,
    SERVICE_ACCOUNT,
    SUBSCRIPTION,
)
from support.operator_under_test import condition_of, holders, operating, spread
from support.wait import await_until

CHILDREN = (CONFIG_MAP, SERVICE, SERVICE_ACCOUNT, DEPLOYMENT, DISRUPTION_BUDGET)


async def test_sidecars_have_configuration_and_no_pods_of_their_own(cluster):
    await cluster.create_relay(runtime="Sidecar")
    await cluster.create_subscription()
    async with operating(cluster) as registry:

        def without():
            labels = {"namespace": cluster.namespace, "relay": "orders"}
            return registry.get_sample_value("mailboat_operator_pods_without_sidecar", labels)

        def ready():
            labels = {"resource": "outboxrelays", "namespace": cluster.namespace, "name": "orders"}
            return registry.get_sample_value("mailboat_operator_ready", labels)

        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "NotEnoughRelays")
        assert (without(), ready()) == (0, 0)
        assert "mailboat.dev/relay: orders" in condition_of(found, "Ready")["message"]
        await cluster.run_pod("shop-1", sidecar=True)
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        await cluster.until_condition(RELAY, "orders", "SidecarsInjected", "True")
        for kind in (DEPLOYMENT, DISRUPTION_BUDGET, SERVICE_ACCOUNT):
            assert await cluster.find(kind, "orders-relay") is None
        assert await cluster.find(SERVICE, "orders-relay") is not None

        await cluster.run_pod("shop-2", sidecar=True, relay_inside=False, answering=False)
        await cluster.run_pod(
            "shop-3", sidecar=True, relay_inside=False, answering=False, annotations={"mailboat.dev/inject": "false"}
        )
        found = await cluster.until_condition(RELAY, "orders", "SidecarsInjected", "False", "SidecarMissing")
        assert condition_of(found, "SidecarsInjected")["message"].count("restart shop-2. ") == 1
        await cluster.until_event("orders", "SidecarMissing")
        assert (without(), ready()) == (1, 1)
        await cluster.remove_pod("shop-2")
        await cluster.until_condition(RELAY, "orders", "SidecarsInjected", "True")
        assert without() == 0


async def test_a_deployment_goes_only_when_a_sidecar_has_taken_over(cluster, orders):
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        await cluster.patch(RELAY, "orders", {"spec": {"runtime": "Sidecar", "replicas": None}})
        await cluster.until_condition(RELAY, "orders", "SidecarsInjected", "True")
        assert await cluster.find(DEPLOYMENT, "orders-relay") is not None
        await cluster.run_pod("shop-1", sidecar=True)

        async def deleted():
            return [
                await cluster.find(kind, "orders-relay") for kind in (DEPLOYMENT, DISRUPTION_BUDGET, SERVICE_ACCOUNT)
            ]

        await await_until(lambda: all_none(deleted()), what="the Deployment and its company to go")
        assert await cluster.find(CONFIG_MAP, "orders-relay") is not None


@pytest.mark.parametrize("while_away", [False, True], ids=["while the operator works", "while it is away"])
async def test_a_relay_that_leaves_the_sidecars_gets_its_deployment_and_they_share_the_work(cluster, while_away):
    await cluster.create_relay(runtime="Sidecar")
    await cluster.create_subscription()
    to_deployment = {"spec": {"runtime": "Deployment", "replicas": 1}}
    async with operating(cluster):
        await cluster.run_pod("shop-1", sidecar=True)
        await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(4), "all at the sidecar")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        if not while_away:
            await cluster.patch(RELAY, "orders", to_deployment)
            await deployed(cluster)
    if while_away:
        await cluster.patch(RELAY, "orders", to_deployment)
        async with operating(cluster):
            await deployed(cluster)


async def deployed(cluster):
    for kind in CHILDREN:
        await cluster.until(kind, "orders-relay", bool, f"the {kind.name}")
    await cluster.run_pod("orders-relay-a")  # both relays run until the application's pods are restarted
    found = await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2), "both to have a share")
    assert set(holders(found).values()) == {"shop-1", "orders-relay-a"}
    await cluster.remove_pod("shop-1")
    await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(4), "all at the Deployment")
    relay = await cluster.until_condition(RELAY, "orders", "Ready", "True")
    assert condition_of(relay, "SidecarsInjected") == {}


async def test_a_change_to_sidecars_during_an_operator_outage_is_applied_later(cluster, orders):
    async with operating(cluster):
        await cluster.run_pod("orders-relay-a")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
    await cluster.patch(RELAY, "orders", {"spec": {"runtime": "Sidecar", "replicas": None}})
    await cluster.run_pod("shop-1", sidecar=True)
    async with operating(cluster):

        async def deleted():
            return await cluster.find(DEPLOYMENT, "orders-relay") is None

        await await_until(deleted, what="the Deployment to go")
        assert await cluster.find(CONFIG_MAP, "orders-relay") is not None


async def all_none(found):
    return all(each is None for each in await found)


@pytest.mark.parametrize("config_map", ["is still there", "was collected"])
async def test_sidecars_pause_when_their_relay_is_deleted(cluster, config_map):
    await cluster.create_relay(runtime="Sidecar")
    await cluster.create_subscription()
    async with operating(cluster):
        relay = await cluster.run_pod("shop-1", sidecar=True)
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        before, version = relay.documents, relay.version
        await relay.stop()
        if config_map == "was collected":
            held = {"metadata": {"finalizers": ["example.com/theirs"]}}  # as during a foreground deletion
            await cluster.patch(RELAY, "orders", held)
            await cluster.delete(RELAY, "orders")
            await cluster.until(RELAY, "orders", lambda it: it["metadata"].get("deletionTimestamp"), "the deletion")
            await cluster.delete(CONFIG_MAP, "orders-relay")
            await cluster.patch(RELAY, "orders", {"metadata": {"finalizers": None}})
        else:
            await cluster.delete(RELAY, "orders")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "RelayNotFound")
        await relay.start()  # unavailable for a moment, and still notified
        await await_until(lambda: relay.version != version, what="another configuration")
        assert relay.version > version
        (_, pushed), (_, after) = before, relay.documents
        assert pushed["spec"].get("state", "Running") == "Running"
        assert after == {**pushed, "spec": {**pushed["spec"], "state": "Paused"}}, "not forgotten, but paused"
        configs = relay.configs
        await cluster.create_subscription("another")
        await cluster.until_condition(SUBSCRIPTION, "another", "Ready", "False", "RelayNotFound")
        assert relay.configs == configs
    if config_map == "is still there":
        relay.version, relay.documents = version, before
        async with operating(cluster):  # another operator, without state
            await await_until(lambda: relay.documents[1]["spec"].get("state") == "Paused", what="the pause")


async def test_sidecars_of_a_relay_deleted_without_its_children_continue(cluster):
    await cluster.create_relay(runtime="Sidecar")
    await cluster.create_subscription()
    async with operating(cluster):
        relay = await cluster.run_pod("shop-1", sidecar=True)
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        held = {"metadata": {"finalizers": ["example.com/theirs"]}}
        await cluster.patch(RELAY, "orders", held)
        await cluster.delete(RELAY, "orders")
    await cluster.patch(CONFIG_MAP, "orders-relay", {"metadata": {"ownerReferences": None}})
    await cluster.patch(RELAY, "orders", {"metadata": {"finalizers": None}})
    configs = relay.configs
    async with operating(cluster):
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "RelayNotFound")
        asked = await cluster.get(CONFIG_MAP, "orders-relay")
        assert "ownerReferences" not in asked["metadata"]
        assert relay.configs == configs


async def test_a_pod_that_refers_to_a_missing_relay_gets_an_event(cluster):
    async with operating(cluster):
        await cluster.run_pod("shop-1", sidecar=True, relay_inside=False, answering=False)
        ((kind, _, message),) = await cluster.until_event("shop-1", "RelayNotFound")
        assert (kind, message.startswith('There is no OutboxRelay "orders"')) == ("Warning", True)


async def test_a_sidecar_that_lacks_a_secret_gets_no_partition_that_needs_it(cluster):
    await cluster.create_relay(runtime="Sidecar")
    sink = {"kafka": {"bootstrapServers": ["k:9092"], "topic": "t", "configSecretRef": {"name": "kafka-login"}}}
    await cluster.create_subscription("plain")
    async with operating(cluster):
        await cluster.run_pod("old", sidecar=True)
        await cluster.until_condition(SUBSCRIPTION, "plain", "Ready", "True")
        await cluster.create_subscription("secret", sink=sink)
        found = await cluster.until_condition(SUBSCRIPTION, "secret", "SecretsMounted", "False", "RestartNeeded")
        assert condition_of(found, "SecretsMounted")["message"].endswith("restart old.")
        await cluster.run_pod("new", sidecar=True, secrets=("orders-db", "kafka-login"))
        found = await cluster.until_condition(SUBSCRIPTION, "secret", "Assigned", "True")
        assert set(holders(found).values()) == {"new"}
        plain = await cluster.until(SUBSCRIPTION, "plain", spread(2, 2), "the plain one to be shared")
        assert set(holders(plain).values()) == {"old", "new"}
