"""Configuration of relays, by the mounted ConfigMap and by signed calls, on a real API server."""

from __future__ import annotations

import pytest

from mailboat_operator.kube.client import (
    CONFIG_MAP,
    RELAY,
    SUBSCRIPTION,
)
from mailboat_operator.resources.pod import RESOURCES_KEY
from support.operator_under_test import condition_of, configuring, operating, quick, subscription
from support.wait import await_until
from support.yaml_bombs import alias_bomb

INVALID_SINK = {"kafka": None, "custom": {"type": "nats", "config": {"auth": {"token": "x"}}}}
"""Valid for the CRD, which has no schema for ``config``. Invalid for the model."""
NONSENSE = "metadata: {name: nonsense}"


async def test_a_subscription_without_its_relay_reports_that_until_the_relay_exists(cluster):
    await cluster.create_subscription()
    async with operating(cluster):
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "RelayNotFound")
        assert condition_of(found, "Stalled")["status"] == "True"
        events = await cluster.until_event("orders-to-kafka", "RelayNotFound")
        assert [kind for kind, reason, _ in events] == ["Warning"]
        await cluster.create_relay()
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "orders-to-kafka"), "the subscription")
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "NotEnoughRelays")
        assert condition_of(found, "Stalled") == {}
        await cluster.delete(SUBSCRIPTION, "orders-to-kafka")
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders"), "the subscription to go")


async def test_a_spec_that_can_not_be_used_any_more_changes_nothing(cluster, orders):
    await cluster.create_subscription("broken", sink={"custom": INVALID_SINK["custom"]})
    async with operating(cluster):
        before = await cluster.until(
            CONFIG_MAP, "orders-relay", configuring("orders", "orders-to-kafka"), "the good one"
        )
        await cluster.until_condition(SUBSCRIPTION, "broken", "Ready", "False", "InvalidSpec")
        await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"sink": INVALID_SINK}})
        found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "InvalidSpec")
        message = condition_of(found, "Ready")["message"]
        assert message.startswith('spec.sink.custom.config["auth.token"]: is a secret')
        assert condition_of(found, "Stalled")["status"] == "True"
        assert ("Warning", "InvalidSpec", message) in await cluster.until_event("orders-to-kafka", "InvalidSpec")
        assert (await cluster.get(CONFIG_MAP, "orders-relay"))["data"] == before["data"]
    await cluster.create_subscription("another")
    async with operating(cluster):  # a new operator also has the last valid form
        after = await cluster.until(
            CONFIG_MAP, "orders-relay", configuring("orders", "another", "orders-to-kafka"), "the new one"
        )
        assert "token" not in after["data"][RESOURCES_KEY]


async def test_a_config_map_full_of_nonsense_takes_no_subscription_from_relays(cluster, orders):
    nonsense = {"data": {RESOURCES_KEY: NONSENSE}}
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        known = [f"{cluster.namespace}/orders-to-kafka"]
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"sink": INVALID_SINK}})
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "False", "InvalidSpec")
        await cluster.patch(CONFIG_MAP, "orders-relay", nonsense)
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "orders-to-kafka"), "it to be put back")
        assert relay.names() == known
    await cluster.patch(CONFIG_MAP, "orders-relay", nonsense)
    await cluster.create_subscription("another")
    corrected = {"custom": None, **subscription()["spec"]["sink"]}
    async with operating(cluster):  # a new operator has no state, and holds the configuration
        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "ConfigurationHeld")
        assert "orders-to-kafka" in condition_of(found, "Ready")["message"]
        assert condition_of(found, "Stalled")["status"] == "True"
        assert (await cluster.get(CONFIG_MAP, "orders-relay"))["data"][RESOURCES_KEY] == NONSENSE
        assert relay.names() == known
        await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"sink": corrected}})
        await await_until(lambda: sorted(relay.names()) == [f"{cluster.namespace}/another", *known], what="both")
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "NotEnoughRelays")


@pytest.mark.timeout(120)
async def test_a_hostile_config_map_is_reverted(cluster, orders):
    bomb = {"data": {RESOURCES_KEY: alias_bomb(12)}}
    async with operating(cluster):
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "orders-to-kafka"), "the configuration")
        await cluster.patch(CONFIG_MAP, "orders-relay", bomb)
        await cluster.until(CONFIG_MAP, "orders-relay", lambda it: "&a12" not in str(it["data"]), "it to be put back")
    await cluster.patch(CONFIG_MAP, "orders-relay", bomb)
    async with operating(cluster):  # a new operator reads the bomb when it starts
        await cluster.until(CONFIG_MAP, "orders-relay", lambda it: "&a12" not in str(it["data"]), "it to be put back")
        found = await cluster.get(CONFIG_MAP, "orders-relay")
        assert configuring("orders", "orders-to-kafka")(found)


async def test_a_configuration_that_grows_is_compressed_until_it_shrinks_again(cluster):
    """Server-side apply moves a key from ``data`` to ``binaryData``: the API server rejects a key in both fields."""
    await cluster.create_relay()
    await cluster.create_subscription("a")
    large = {"custom": {"type": "nats", "config": {"ballast": "x" * 200_000}}}
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "a"), "the first one")
        for name in ("b", "c", "d"):
            await cluster.create_subscription(name, sink=large)
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "a", "b", "c", "d"), "all of them")
        assert "binaryData" in await cluster.get(CONFIG_MAP, "orders-relay")
        await await_until(lambda: len(relay.names()) == 4, what="the relay to have all of them")
        await cluster.delete(SUBSCRIPTION, "b")
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "a", "c", "d"), "one less")
        assert "binaryData" not in await cluster.get(CONFIG_MAP, "orders-relay")


async def test_a_configuration_reaches_relays_that_are_there_and_relays_that_come(cluster):
    await cluster.create_relay()
    async with operating(cluster):
        first = await cluster.run_pod("orders-relay-a")
        await await_until(lambda: first.version, what="the configuration")
        versions = [first.version]
        await cluster.create_subscription()
        await await_until(lambda: len(first.documents) == 2, what="the subscription")
        versions.append(first.version)
        second = await cluster.run_pod("orders-relay-b")
        await await_until(lambda: second.version == first.version, what="the same at the second relay")
        assert versions == sorted(set(versions))
        assert first.configs == 2, "nobody gets the same configuration twice"

        second.version = first.version + 5_000  # as if the ConfigMap had been restored from a backup
        second.documents = []
        await await_until(lambda: len(second.documents) == 2, what="a version above the one in use")
        assert second.version > versions[-1] + 5_000


async def test_a_status_is_of_the_generation_that_relays_have(cluster, orders):
    """Clients that wait until a change is in use (kubectl, Argo CD) compare generations."""
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        relay.refuses_configs, offered = "spec.urgency: there is no such field", relay.offered
        changed = await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"delivery": {"maxAttempts": 7}}})
        generation = changed["metadata"]["generation"]
        await await_until(lambda: relay.offered >= offered + 3, what="looks at it")
        found = await cluster.get(SUBSCRIPTION, "orders-to-kafka")
        assert found["status"]["observedGeneration"] == generation - 1
        assert condition_of(found, "Ready")["status"] == "True", "it is delivered as before"
        relay.refuses_configs = ""
        await cluster.until(
            SUBSCRIPTION,
            "orders-to-kafka",
            lambda it: it["status"]["observedGeneration"] == generation,
            "the change to be in use",
        )


async def test_calls_are_signed_for_one_pod(cluster):
    await cluster.create_relay()
    async with operating(cluster):
        impostor = await cluster.run_pod("orders-relay-a", answering=False)
        impostor.uid = "another"
        await impostor.start()
        await await_until(lambda: impostor.refused, what="a call that is refused")
        assert (impostor.refused[0], impostor.version) == (401, None)


async def test_a_refused_first_configuration_is_reported_and_pushed_once_per_reconcile(cluster, caplog):
    await cluster.create_relay()
    relay = await cluster.run_pod("orders-relay-a", answering=False)
    relay.refuses_configs = "spec.urgency: there is no such field"
    await relay.start()
    async with operating(cluster, quick(cluster.namespace, status_interval=4.0)):
        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "InvalidSpec")
        assert relay.refuses_configs in condition_of(found, "Ready")["message"]
        assert ("Warning", "InvalidSpec") in [each[:2] for each in await cluster.until_event("orders", "InvalidSpec")]
        offered, polls = relay.offered, relay.polls
        await await_until(lambda: relay.offered >= offered + 2, what="two more offers")
        assert relay.offered - offered <= relay.polls - polls + 1, "once per look"
    events = [record for record in caplog.records if record.message.startswith("Relay refused the configuration")]
    assert len(events) == 1
