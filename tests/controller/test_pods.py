"""Pods as the operator reads them: whether a pod has a relay, the relay's port, and why it does not start."""

from __future__ import annotations

import pytest

from mailboat_operator.relays.pods import relay_pod
from mailboat_operator.resources import deployment
from mailboat_operator.resources.pod import RelayImage, relay_labels
from mailboat_operator.webhook.injection import inject
from mailboat_spec import OutboxRelay

IMAGE = RelayImage("mailboat-relay:1")
RELAY = {"name": "mailboat-relay", "image": "mailboat-relay:1"}
SIDECAR = {**RELAY, "restartPolicy": "Always"}
SHOP = {"name": "shop", "image": "shop:1"}


def pod(labels=None, annotations=None, **spec):
    metadata = {"namespace": "shop", "name": "p", "uid": "u", "annotations": annotations or {}}
    metadata["labels"] = labels or {"mailboat.dev/relay": "orders"}
    return {"metadata": metadata, "spec": spec, "status": {"podIP": "10.0.0.1"}}


@pytest.mark.parametrize(
    ("found", "has_relay"),
    [
        (pod(relay_labels("orders"), containers=[RELAY]), True),
        (pod(annotations={"mailboat.dev/injected": "x"}, containers=[SHOP], initContainers=[SIDECAR]), True),
        (pod(containers=[{**SHOP, "name": "mailboat-relay"}]), False),
        (pod(containers=[SHOP], initContainers=[SIDECAR]), False),
        (pod(annotations={"mailboat.dev/injected": "x"}, containers=[SHOP]), False),
    ],
    ids=["of a Deployment", "injected", "a container of that name", "an init container of that name", "a copied note"],
)
def test_a_pod_has_a_relay_only_if_the_operator_added_it(found, has_relay):
    read = relay_pod(found)
    assert (read.has_relay, read.lacks_sidecar) == (has_relay, not has_relay)


@pytest.mark.parametrize(
    ("annotation", "port"),
    [
        (None, 9808),
        ("7000", 7000),
        (" 7000 ", 7000),
        ("00080", 80),
        ("000080", 9808),
        ("65536", 9808),
        ("7" * 5000, 9808),
    ],
    ids=["none", "plain", "with spaces", "five digits", "six", "too high", "endless"],
)
def test_all_parts_use_the_same_port(annotation, port):
    annotations = {} if annotation is None else {"mailboat.dev/port": annotation}
    assert relay_pod(pod(annotations=annotations)).address == f"10.0.0.1:{port}"

    spec = {"database": {"url": "postgresql://db/x"}, "template": {"annotations": annotations}}
    manifest = {"metadata": {"namespace": "shop", "name": "orders", "uid": "1", "generation": 1}, "spec": spec}
    template = deployment(OutboxRelay.model_validate(manifest), IMAGE, [])["spec"]["template"]
    assert template["spec"]["containers"][0]["ports"][0]["containerPort"] == port

    sidecars = {**manifest, "apiVersion": "mailboat.dev/v1alpha1", "kind": "OutboxRelay"}
    sidecars["spec"] = {"database": spec["database"], "runtime": "Sidecar"}
    answer = inject(pod(annotations=annotations, containers=[SHOP]), "shop", sidecars, (), IMAGE)
    assert answer.sidecar is not None
    assert answer.sidecar.container["ports"][0]["containerPort"] == port


def test_the_reason_that_a_relay_does_not_start_is_read_from_its_pod():
    def problem(container="containerStatuses", waiting=None, conditions=()):
        status = {
            "conditions": list(conditions),
            container: [{"name": "mailboat-relay", "state": {"waiting": waiting}}],
        }
        spec = {"containers": [{"name": "mailboat-relay", "image": "relay:1"}]}
        metadata = {"namespace": "shop", "name": "a", "uid": "u", "labels": {}}
        return relay_pod({"metadata": metadata, "spec": spec, "status": status}).problem

    assert problem() == problem(waiting={"reason": "ContainerCreating"}) == ""
    pending = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }
    assert problem(conditions=[pending]) == "can't be scheduled (Unschedulable: 0/3 nodes are available)"
    pulls = [problem(waiting={"reason": each, "message": each}) for each in ("ErrImagePull", "ImagePullBackOff")]
    assert pulls == ["the image relay:1 can't be pulled"] * 2
    bad = {"reason": "CreateContainerConfigError", "message": "runAsNonRoot"}
    assert problem("initContainerStatuses", bad) == "can't start (CreateContainerConfigError: runAsNonRoot)"


@pytest.mark.parametrize(
    ("limits", "ended", "text"),
    [
        (
            {"memory": "64Mi"},
            {"reason": "OOMKilled", "exitCode": 137},
            "was killed (OOMKilled, exit code 137, memory limit 64Mi), and is restarted: raise spec.template",
        ),
        ({}, {"reason": "OOMKilled", "exitCode": 137}, "memory limit none), and is restarted: the node ran out"),
        ({}, {"reason": "Error", "exitCode": 3}, "ended with exit code 3 (Error), and is restarted: see its log"),
    ],
)
def test_the_end_of_a_relay_is_reported_until_it_is_ready_again(limits, ended, text):
    def problem(ready, **state):
        container = {"name": "mailboat-relay", "resources": {"limits": limits}}
        status = {"name": "mailboat-relay", "ready": ready, "state": state, "lastState": {"terminated": ended}}
        return relay_pod(
            {
                "metadata": {"namespace": "shop", "name": "a", "uid": "u"},
                "spec": {"containers": [container]},
                "status": {"containerStatuses": [status]},
            }
        ).problem

    waits = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
    assert problem(False, waiting=waits) == problem(False, running={}), "the same words while it comes and goes"
    assert text in problem(False, running={})
    assert problem(True, running={}) == ""
