"""Children of a relay: created, and restored after changes by other clients, on a real API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    RELAY,
    SERVICE,
    SERVICE_ACCOUNT,
    SUBSCRIPTION,
    Kind,
)
from mailboat_operator.resources.pod import RESOURCES_KEY
from support.operator_under_test import CHILDREN, condition_of, configuring, operating
from support.wait import await_until


async def test_a_relay_becomes_its_children_and_its_resource_is_not_annotated(cluster):
    async with operating(cluster):
        await cluster.create_relay()
        for kind in CHILDREN:
            child = await cluster.until(kind, "orders-relay", bool, f"the {kind.name}")
            (owner,) = child["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["controller"]) == ("OutboxRelay", "orders", True)
        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")
        assert "finalizers" not in found["metadata"]
        assert "annotations" not in found["metadata"]


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.name)
async def test_a_deleted_child_is_created_again(cluster, kind):
    await cluster.create_relay()
    async with operating(cluster):
        before = await cluster.until(kind, "orders-relay", bool, f"the {kind.name}")
        await cluster.delete(kind, "orders-relay")
        uid = before["metadata"]["uid"]
        await cluster.until(kind, "orders-relay", lambda found: found["metadata"]["uid"] != uid, f"a new {kind.name}")


FOREIGN_EDITS: list[tuple[Kind, dict[str, Any], Callable[[Any], bool]]] = [
    (CONFIG_MAP, {"data": {RESOURCES_KEY: "nonsense"}}, lambda it: "OutboxRelay" in it["data"][RESOURCES_KEY]),
    (SERVICE, {"spec": {"selector": {"app": "theirs"}}}, lambda it: "app" not in it["spec"]["selector"]),
    (DEPLOYMENT, {"spec": {"replicas": 7}}, lambda it: it["spec"]["replicas"] == 2),
    (DEPLOYMENT, {"spec": {"paused": True}}, lambda it: not it["spec"].get("paused")),  # `kubectl rollout pause`
    (
        DEPLOYMENT,
        {"metadata": {"labels": {"mailboat.dev/relay": None}}},
        lambda it: it["metadata"]["labels"].get("mailboat.dev/relay") == "orders",
    ),
    (SERVICE_ACCOUNT, {"automountServiceAccountToken": True}, lambda it: it["automountServiceAccountToken"] is False),
    (DISRUPTION_BUDGET, {"spec": {"maxUnavailable": 3}}, lambda it: it["spec"]["maxUnavailable"] == 1),
]


@pytest.mark.parametrize("while_away", [False, True], ids=["while the operator works", "while it is away"])
@pytest.mark.parametrize(
    ("kind", "edit", "restored"), FOREIGN_EDITS, ids=[f"{kind.name} {sorted(edit)}" for kind, edit, _ in FOREIGN_EDITS]
)
async def test_a_foreign_edit_is_reverted(cluster, kind, edit, restored, while_away):
    await cluster.create_relay()
    async with operating(cluster):
        await cluster.until(kind, "orders-relay", bool, f"the {kind.name}")
        await cluster.until_condition(RELAY, "orders", "Ready", "False")
        if not while_away:
            await cluster.patch(kind, "orders-relay", edit)
            await cluster.until(kind, "orders-relay", restored, "the edit to be put back")
            await cluster.until_event("orders", "DriftCorrected")
    if while_away:
        await cluster.patch(kind, "orders-relay", edit)
        async with operating(cluster):
            await cluster.until(kind, "orders-relay", restored, "the edit to be put back")


async def test_fields_of_other_controllers_are_not_changed(cluster):
    await cluster.create_relay()
    async with operating(cluster):
        await cluster.until(DEPLOYMENT, "orders-relay", bool, "the Deployment")
        await cluster.until_condition(RELAY, "orders", "Ready", "False")
        noted = {"metadata": {"annotations": {"example.com/note": "theirs"}}}
        await cluster.patch(DEPLOYMENT, "orders-relay", noted)
        await cluster.patch(RELAY, "orders", {"spec": {"replicas": 3}})
        found = await cluster.until(
            DEPLOYMENT, "orders-relay", lambda found: found["spec"]["replicas"] == 3, "3 replicas"
        )
        assert found["metadata"]["annotations"]["example.com/note"] == "theirs"


async def test_a_field_that_left_the_template_leaves_the_deployment(cluster):
    await cluster.create_relay(template={"nodeSelector": {"disk": "fast"}, "resources": {"limits": {"cpu": "1000m"}}})
    async with operating(cluster):
        await cluster.until(
            DEPLOYMENT,
            "orders-relay",
            lambda found: found["spec"]["template"]["spec"].get("nodeSelector") == {"disk": "fast"},
            "the selector",
        )
        await cluster.patch(RELAY, "orders", {"spec": {"template": {"nodeSelector": None}}})
        await cluster.until(
            DEPLOYMENT,
            "orders-relay",
            lambda found: "nodeSelector" not in found["spec"]["template"]["spec"],
            "the selector to go",
        )


async def test_pods_roll_only_for_changes_that_they_cannot_reload(cluster):
    await cluster.create_relay()
    async with operating(cluster):
        before = await cluster.until(DEPLOYMENT, "orders-relay", bool, "the Deployment")
        await cluster.create_subscription()
        await cluster.until(CONFIG_MAP, "orders-relay", configuring("orders", "orders-to-kafka"), "the subscription")
        await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"partitions": 6}})
        await cluster.until(CONFIG_MAP, "orders-relay", lambda it: '"partitions":6' in it["data"][RESOURCES_KEY], "6")
        after = await cluster.get(DEPLOYMENT, "orders-relay")
        assert after["metadata"]["generation"] == before["metadata"]["generation"]

        secret = {"kafka": {"configSecretRef": {"name": "kafka-login"}}}
        await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"sink": secret}})
        await cluster.until(
            DEPLOYMENT,
            "orders-relay",
            lambda it: "kafka-login" in str(it["spec"]["template"]["spec"]["volumes"]),
            "the Secret to be mounted",
        )


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.name)
async def test_an_object_of_the_same_name_that_is_not_ours_is_never_touched(cluster, kind):
    theirs: dict[Kind, Any] = {
        CONFIG_MAP: {"data": {"theirs": "1"}},
        SERVICE: {"spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}},
        DEPLOYMENT: {
            "spec": {
                "selector": {"matchLabels": {"app": "theirs"}},
                "template": {
                    "metadata": {"labels": {"app": "theirs"}},
                    "spec": {"containers": [{"name": "theirs", "image": "theirs:1"}]},
                },
            }
        },
        SERVICE_ACCOUNT: {},
        DISRUPTION_BUDGET: {"spec": {"maxUnavailable": 2, "selector": {"matchLabels": {"app": "theirs"}}}},
    }
    body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": "orders-relay"}, **theirs[kind]}
    before = await cluster.create(kind, body)
    await cluster.create_relay()
    async with operating(cluster):
        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "NameTaken")
        assert f'{kind.name} "orders-relay" exists and is not Mailboat' in condition_of(found, "Ready")["message"]
        assert condition_of(found, "Stalled")["status"] == "True"
        assert (await cluster.get(kind, "orders-relay"))["metadata"] == before["metadata"]

        await cluster.delete(kind, "orders-relay")  # no watch event: the object is not labelled as a child
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")


@pytest.mark.parametrize(
    ("affinity", "words"),
    [
        (
            {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
            "nodeSelectorTerms",
        ),
        ({"foo": "bar"}, ".spec.template.spec.affinity.foo: field not declared in schema"),
        ({"nodeAffinity": "x"}, ".spec.template.spec.affinity.nodeAffinity: expected map"),
    ],
    ids=["a wrong value", "an unknown field", "a wrong type"],
)
async def test_a_refusal_of_the_api_server_is_reported_in_its_words(cluster, affinity, words):
    await cluster.create_relay(template={"affinity": affinity})
    async with operating(cluster):
        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "InvalidSpec")
        assert words in condition_of(found, "Ready")["message"]
        assert condition_of(found, "Stalled")["status"] == "True"
        assert "Warning" in [each[0] for each in await cluster.until_event("orders", "InvalidSpec")]
        await cluster.patch(RELAY, "orders", {"spec": {"template": {"affinity": None}}})
        await cluster.until(DEPLOYMENT, "orders-relay", bool, "the Deployment")


async def test_reconciling_again_writes_nothing(cluster):
    await cluster.create_relay(template={"resources": {"limits": {"cpu": "1000m", "memory": "0.5Gi"}}})
    await cluster.create_subscription()
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
        await cluster.until(RELAY, "orders", lambda it: it["status"].get("readyReplicas") == 1, "the relay's status")
        polls = relay.polls
        await await_until(lambda: relay.polls > polls + 2, what="all to be settled")
        before = [await cluster.get(kind, "orders-relay") for kind in CHILDREN]
        polls = relay.polls
        await await_until(lambda: relay.polls > polls + 5, what="more looks")
        assert [await cluster.get(kind, "orders-relay") for kind in CHILDREN] == before
    async with operating(cluster):  # a new operator without state
        polls = relay.polls
        await await_until(lambda: relay.polls > polls + 3, what="looks of the new operator")
        after = [await cluster.get(kind, "orders-relay") for kind in CHILDREN]
        versions = [child["metadata"]["resourceVersion"] for child in before]
        assert [child["metadata"]["resourceVersion"] for child in after] == versions
