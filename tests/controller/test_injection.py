"""Injection: which pods get a sidecar, the parts of the sidecar, and that no error prevents an application's start."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailboat_operator.relays.pods import relay_pod
from mailboat_operator.resources.pod import RelayImage, is_injected, relay_labels, secret_volume
from mailboat_operator.webhook.injection import (
    NO_TOKEN_VOLUME,
    TOKEN_FOLDER,
    Injection,
    Outcome,
    inject,
    requested_relay,
    sidecar_error,
    trial,
)
from support.manifests import Manifest, event_subscription, kafka_sink, outbox_relay

IMAGE = RelayImage("mailboat-relay:1")
API = "mailboat.dev/v1alpha1"


def a_pod(**changes: Any) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "shop-", "labels": {"app": "shop", "mailboat.dev/relay": "orders"}},
        "spec": {"containers": [{"name": "shop", "image": "shop:1"}]},
    }
    pod["metadata"] |= changes.pop("metadata", {})
    pod["spec"] |= changes
    return pod


a_relay = partial(outbox_relay, metadata={"uid": "1", "generation": 1}, runtime="Sidecar")


def a_subscription(name: str = "to-kafka", relay: str = "orders", secret: str | None = "kafka-login") -> Manifest:
    sink = kafka_sink() if secret is None else kafka_sink(configSecretRef={"name": secret})
    return event_subscription(name, sink, relay=relay, delivery={"deadLetter": {"topic": "orders.dead"}})


def patched(pod: dict[str, Any], injection: Injection) -> dict[str, Any]:
    """Apply the patch to the pod as RFC 6902 defines (only "add" is used)."""
    result = copy.deepcopy(pod)
    for step in injection.patch:
        assert step["op"] == "add"
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        place: Any = result
        for part in path:
            place = place[part]
        if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), step["value"])
        else:
            place[last] = step["value"]
    return result


def injected(
    pod: dict[str, Any], relay: dict[str, Any] | None = None, *subscriptions: dict[str, Any]
) -> dict[str, Any]:
    answer = inject(pod, "shop", relay or a_relay(), subscriptions, IMAGE)
    assert answer.outcome is Outcome.INJECTED
    return patched(pod, answer)


def test_the_sidecar_starts_first_restarts_always_and_has_its_volumes_and_variables() -> None:
    setup = {"name": "setup", "image": "setup:1"}
    pod = injected(a_pod(initContainers=[setup]), a_relay(), a_subscription())
    sidecar, after = pod["spec"]["initContainers"]
    assert after == setup
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("mailboat-relay", "Always")
    assert sidecar["image"] == IMAGE.name
    assert sidecar["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 9808, "scheme": "HTTP"}
    assert "readinessProbe" not in sidecar
    assert "startupProbe" not in sidecar
    assert sidecar["securityContext"]["runAsNonRoot"]
    assert {each["name"] for each in sidecar["env"]} >= {"POD_NAME", "POD_NAMESPACE", "POD_UID"}
    mounted = {each["name"]: each["mountPath"] for each in sidecar["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert set(mounted) == set(volumes)
    assert mounted[secret_volume("orders-db")] == "/etc/mailboat/secrets/orders-db"
    assert mounted[secret_volume("kafka-login")] == "/etc/mailboat/secrets/kafka-login"
    assert pod["spec"]["containers"] == a_pod()["spec"]["containers"]


def test_nothing_that_it_mounts_has_to_exist() -> None:
    pod = injected(a_pod(), a_relay(), a_subscription())
    for volume in pod["spec"]["volumes"]:
        source = volume.get("secret") or volume.get("configMap")
        if source is not None:
            assert source["optional"] is True
        else:
            assert volume["emptyDir"]["medium"] == "Memory", "other local storage ties the pod to its node"


def test_no_variable_of_its_has_to_exist() -> None:
    env = [
        {"name": "PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}},
        {"name": "ZONE", "valueFrom": {"configMapKeyRef": {"name": "zone", "key": "it", "optional": False}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "TZ", "value": "UTC"},
    ]
    (sidecar,) = injected(a_pod(), a_relay(template={"env": env}))["spec"]["initContainers"]
    *_, proxy, zone, node, tz = sidecar["env"]
    assert proxy["valueFrom"] == {"secretKeyRef": {"name": "proxy", "key": "url", "optional": True}}
    assert zone["valueFrom"] == {"configMapKeyRef": {"name": "zone", "key": "it", "optional": True}}
    assert [node, tz] == env[2:]


def test_an_empty_folder_lies_where_the_api_token_would() -> None:
    sidecar = injected(a_pod())["spec"]["initContainers"][0]
    mounts = {each["mountPath"]: each for each in sidecar["volumeMounts"]}
    assert mounts[TOKEN_FOLDER] == {"name": NO_TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True}


def test_only_secrets_of_the_relays_subscriptions_are_mounted_and_invalid_ones_do_not_block() -> None:
    broken = a_subscription("broken", secret="broken-login")
    broken["spec"]["sink"] = {"kafka": {}, "http": {}}
    others = a_subscription("other", relay="invoices", secret="others-login")
    pod = injected(a_pod(), a_relay(), a_subscription(), others, broken)
    assert secrets_in_volumes(pod) == {"orders-db", "kafka-login"}


@pytest.mark.parametrize(("relay", "seen"), [("orders", {"broken-login"}), ("invoices", set()), (None, set())])
def test_a_subscription_that_became_invalid_keeps_its_secret_as_relays_keep_it(relay: Any, seen: set[str]) -> None:
    """Relays keep the last valid form of the subscription, also in new pods."""
    broken = a_subscription("broken", relay=relay, secret="broken-login")
    broken["spec"]["nonsense"] = True
    assert secrets_in_volumes(injected(a_pod(), a_relay(), broken)) == {"orders-db"} | seen


def secrets_in_volumes(pod: dict[str, Any]) -> set[str]:
    return {each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each}


def test_secrets_for_pulling_the_image_are_added_once() -> None:
    relay = a_relay(template={"imagePullSecrets": [{"name": "pull"}, {"name": "also"}]})
    pod = injected(a_pod(imagePullSecrets=[{"name": "pull"}]), relay)
    assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}, {"name": "also"}]


def test_an_injected_pod_is_not_injected_again() -> None:
    pod = injected(a_pod(), a_relay(), a_subscription())
    assert is_injected(pod)
    assert requested_relay(pod) is None
    assert inject(pod, "shop", a_relay(), (a_subscription(),), IMAGE) == Injection(Outcome.NOT_ASKED)


def test_the_annotation_differs_for_different_templates_only() -> None:
    def mark(pod: dict[str, Any]) -> str:
        return str(pod["metadata"]["annotations"]["mailboat.dev/injected"])

    assert mark(injected(a_pod())) == mark(injected(a_pod(metadata={"annotations": {"a": "b"}})))
    assert mark(injected(a_pod())) != mark(injected(a_pod(), a_relay(), a_subscription()))
    assert injected(a_pod(metadata={"annotations": {"a": "b"}}))["metadata"]["annotations"]["a"] == "b"


def test_a_copied_annotation_without_a_sidecar_proves_nothing() -> None:
    pod = a_pod(metadata={"annotations": {"mailboat.dev/injected": "from a template"}})
    after = injected(pod)
    assert is_injected(after)
    assert after["metadata"]["annotations"]["mailboat.dev/injected"] != "from a template"


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {}},
        {"labels": None},
        {"labels": {"mailboat.dev/relay": ""}},
        {"annotations": {"mailboat.dev/inject": "false"}},
        {"annotations": {"kubernetes.io/config.mirror": "static"}},
        {"labels": relay_labels("orders")},
    ],
)
def test_pods_without_the_label_are_not_changed(metadata: dict[str, Any]) -> None:
    assert inject(a_pod(metadata=metadata), "shop", a_relay(), (), IMAGE) == Injection(Outcome.NOT_ASKED)


@pytest.mark.parametrize(
    ("pod", "relay", "remedy"),
    [
        (a_pod(), None, "Create it, then restart the pod"),
        (a_pod(), a_relay(runtime="Deployment"), "set runtime: Sidecar"),
        (a_pod(), a_relay(database={}), "Its conditions say why"),
        (a_pod(), a_relay(runtime="Rocket"), "Its conditions say why"),
        (a_pod(os={"name": "windows"}), a_relay(), "use runtime Deployment"),
        (a_pod(containers=[{"name": "mailboat-relay"}]), a_relay(), 'a container called "mailboat-relay" of its own'),
        (a_pod(initContainers=[{"name": "mailboat-relay"}]), a_relay(), 'a container called "mailboat-relay"'),
        (a_pod(volumes=[{"name": "mailboat-config"}]), a_relay(), 'a volume called "mailboat-config" of its own'),
    ],
)
def test_a_pod_that_cannot_be_injected_gets_a_warning_with_the_remedy(
    pod: dict[str, Any], relay: dict[str, Any] | None, remedy: str
) -> None:
    answer = inject(pod, "shop", relay, (), IMAGE)
    assert answer.outcome is Outcome.LEFT_OUT
    assert answer.patch == ()
    (warning,) = answer.warnings
    assert remedy in warning
    assert warning.startswith("mailboat: ")
    assert len(warning) <= 250


@pytest.mark.parametrize(
    ("refusal", "short"),
    [
        (
            'POST /apis/apps/v1/namespaces/shop/deployments: Deployment.apps "mailboat-trial-ffrvz" is invalid: '
            'spec.template.spec.initContainers[0].securityContext: Invalid value: {"Capabilities":{"Add":null},'
            '"Privileged":true}: cannot set `allowPrivilegeEscalation` to false and `privileged` to true (422)',
            "securityContext: cannot set `allowPrivilegeEscalation` to false and `privileged` to true (422)",
        ),
        (
            'POST /apis/apps/v1/namespaces/shop/deployments: Deployment in version "v1" cannot be handled as a '
            "Deployment: json: cannot unmarshal string into Go struct field SecurityContext.spec.template.spec."
            "initContainers.securityContext.runAsUser of type int64 (400)",
            "a string does not fit into securityContext.runAsUser of type int64 (400)",
        ),
    ],
)
def test_a_refused_dry_run_is_reported_with_its_field(refusal: str, short: str) -> None:
    assert sidecar_error(refusal) == short


@pytest.mark.parametrize(
    "refusal",
    [
        "deployments.apps \"mailboat-trial-\" is forbidden: ValidatingAdmissionPolicy 'team' with binding 'b' denied "
        "request: a Deployment needs the label team (422)",
        'admission webhook "owners.example.com" denied the request: it is invalid: spec.template.spec.volumes '
        "has no owner (400)",
        'admission webhook "old.example.com" does not support dry run (400)',
        'Deployment.apps "mailboat-trial-x" is invalid: metadata.labels: Required value: team (422)',
    ],
)
def test_a_refusal_for_other_reasons_does_not_blame_the_sidecar(refusal: str) -> None:
    assert sidecar_error(f"POST /apis/apps/v1/namespaces/shop/deployments: {refusal}") is None


def test_a_dry_run_has_the_injected_sidecar_and_no_replicas() -> None:
    answer = inject(a_pod(), "shop", a_relay(), (a_subscription(),), IMAGE)
    assert answer.sidecar is not None
    spec = trial(answer.sidecar, "shop")["spec"]
    after = patched(a_pod(), answer)["spec"]
    assert spec["replicas"] == 0
    assert spec["template"]["spec"]["initContainers"] == after["initContainers"]
    assert spec["template"]["spec"]["volumes"] == after["volumes"]


# ---- ports --------------------------------------------------------------------------------------------------------


def test_the_port_can_be_chosen() -> None:
    sidecar = injected(a_pod(metadata={"annotations": {"mailboat.dev/port": "7000"}}))["spec"]["initContainers"][0]
    assert sidecar["ports"][0]["containerPort"] == 7000
    assert sidecar["livenessProbe"]["httpGet"]["port"] == 7000
    assert "[::]:7000" in sidecar["args"]


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "http", "1e3", "\u0663", "1" * 5000])
def test_an_invalid_port_is_reported_and_the_default_is_used(port: str) -> None:
    answer = inject(a_pod(metadata={"annotations": {"mailboat.dev/port": port}}), "shop", a_relay(), (), IMAGE)
    assert answer.outcome is Outcome.INJECTED
    assert "listens on 9808" in answer.warnings[0]


def test_a_port_that_another_container_has_is_left_to_it_and_the_next_is_taken_and_written_down() -> None:
    taken = {"name": "shop", "ports": [{"containerPort": 9808}, {"containerPort": 9809}]}
    for metadata in ({}, {"annotations": {"a": "b"}}):
        pod = a_pod(metadata=metadata, containers=[taken])
        answer = inject(pod, "shop", a_relay(), (), IMAGE)
        after = patched(pod, answer)
        assert after["spec"]["initContainers"][0]["ports"][0]["containerPort"] == 9810
        assert after["metadata"]["annotations"]["mailboat.dev/port"] == "9810"
        assert "listens on 9810" in answer.warnings[0]
        where = {"namespace": "shop", "name": "shop-1", "uid": "u"}
        seen = {**after, "metadata": {**after["metadata"], **where}, "status": {"podIP": "10.0.0.1"}}
        assert relay_pod(seen).address == "10.0.0.1:9810", "where the operator looks for it"


def test_a_chosen_port_that_another_container_has_leaves_the_relay_out() -> None:
    taken = {"name": "shop", "ports": [{"containerPort": 7000}]}
    pod = a_pod(metadata={"annotations": {"mailboat.dev/port": "7000"}}, containers=[taken])
    answer = inject(pod, "shop", a_relay(), (), IMAGE)
    assert (answer.outcome, answer.patch) == (Outcome.LEFT_OUT, ())
    assert "Choose another port" in answer.warnings[0]


def test_on_the_host_network_no_port_is_declared_and_a_warning_names_the_collision() -> None:
    answer = inject(a_pod(hostNetwork=True), "shop", a_relay(), (), IMAGE)
    sidecar = patched(a_pod(hostNetwork=True), answer)["spec"]["initContainers"][0]
    assert "ports" not in sidecar
    assert sidecar["livenessProbe"]["httpGet"]["port"] == 9808
    assert "port 9808 of the node" in answer.warnings[0]


# ---- any pod ------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["shop", "setup", "mailboat-relay", "mailboat-config", "mailboat-tmp", "data"])
CONTAINERS = st.lists(st.fixed_dictionaries({"name": NAMES}), max_size=3, unique_by=lambda each: each["name"])
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                "labels": st.none() | st.dictionaries(st.sampled_from(["mailboat.dev/relay", "a"]), st.just("orders")),
                "annotations": st.none()
                | st.dictionaries(
                    st.sampled_from(["mailboat.dev/port", "mailboat.dev/inject", "mailboat.dev/injected", "a/b~c"]),
                    st.sampled_from(["false", "80", ""]),
                ),
            },
        ),
        "spec": st.fixed_dictionaries(
            {"containers": CONTAINERS},
            optional={
                "initContainers": st.none() | CONTAINERS,
                "volumes": st.none() | CONTAINERS,
                "imagePullSecrets": st.none() | CONTAINERS,
                "hostNetwork": st.booleans(),
            },
        ),
    }
)


@settings(deadline=None)
@given(PODS, st.booleans(), st.booleans())
def test_the_patch_of_any_pod_only_adds_and_a_second_one_adds_nothing(
    pod: dict[str, Any], there: bool, pull: bool
) -> None:
    relay = a_relay(template={"imagePullSecrets": [{"name": "pull"}]} if pull else {}) if there else None
    before = copy.deepcopy(pod)
    answer = inject(pod, "shop", relay, (a_subscription(),), IMAGE)
    assert pod == before, "the request itself is not touched"
    after = patched(pod, answer)
    assert bool(answer.patch) == (answer.outcome is Outcome.INJECTED)
    assert is_injected(after) or not answer.patch
    if answer.patch:
        assert inject(after, "shop", relay, (a_subscription(),), IMAGE) == Injection(Outcome.NOT_ASKED)
    for field in ("containers", "initContainers", "volumes", "imagePullSecrets"):
        had, has = before["spec"].get(field) or [], after["spec"].get(field) or []
        assert [each for each in has if each in had] == had
        assert len({each["name"] for each in has}) == len(has)
