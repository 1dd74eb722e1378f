"""The children of a relay: rights and mounts of pods, and versions of the configuration."""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat.runtime.timings import Timings
from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, SERVICE, SERVICE_ACCOUNT
from mailboat_operator.resources import Owner, deployment, desired, disruption_budget, owner_of
from mailboat_operator.resources.configmap import (
    Configuration,
    all_paused,
    config_map_content,
    configuration_in,
    item,
    last_valid_form,
    next_configuration,
    raw_item,
    too_large,
)
from mailboat_operator.resources.pod import (
    DRAIN_SECONDS,
    RelayImage,
    is_relay_pod,
    relay_labels,
    relay_volumes,
    secret_volume,
    secrets_in,
    sink_secrets,
)
from mailboat_spec import EventSubscription, EventSubscriptionSpec, Filter, OutboxRelay, read_documents
from support.complete_manifests import COMPLETE
from support.manifests import event_subscription, kafka_sink, outbox_relay
from support.yaml_bombs import alias_bomb

IMAGE = RelayImage("mailboat-relay:1")


def relay(**spec):
    metadata = {"uid": "u1", "generation": 3, "labels": {"team": "x"}}
    return OutboxRelay.model_validate(outbox_relay(metadata=metadata, **spec))


def subscription(name="out", sink=None, **spec):
    metadata = {"uid": f"uid-{name}", "generation": 1}
    return EventSubscription.model_validate(event_subscription(name, sink or kafka_sink(), metadata=metadata, **spec))


def pod_of(**template):
    return deployment(relay(template=template), IMAGE, ["orders-db"])["spec"]["template"]


def test_a_pod_is_harmless_by_default():
    pod = pod_of()["spec"]
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["runAsNonRoot"] is security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["resources"]["requests"]
    assert container["resources"]["limits"]["memory"]
    assert (container["livenessProbe"]["httpGet"]["path"], container["readinessProbe"]["httpGet"]["path"]) == (
        "/livez",
        "/readyz",
    )


def test_a_missing_secret_keeps_no_pod_from_starting():
    volumes = relay_volumes("orders", ["orders-db", "kafka.login"])
    assert all(each["secret"]["optional"] for each in volumes if "secret" in each)
    assert volumes[0]["configMap"] == {"name": "orders-relay", "optional": True}


def test_a_rollout_that_hangs_is_reported_after_two_minutes():
    assert deployment(relay(), IMAGE, [])["spec"]["progressDeadlineSeconds"] == 120


def test_the_template_adds_and_our_own_labels_and_variables_win():
    env = [{"name": "POD_NAME", "value": "mine"}, {"name": "TZ", "value": "UTC"}]
    pod = pod_of(
        labels={"team": "shop", "mailboat.dev/relay": "another"},
        annotations={"note": "x", "mailboat.dev/port": "9000"},
        env=env,
        nodeSelector={"disk": "fast"},
        tolerations=[{"key": "relays", "effect": "NoSchedule"}],
        imagePullSecrets=[{"name": "registry"}],
        securityContext={"runAsUser": 1000, "seccompProfile": None},
        resources={"limits": {"cpu": 1}},
        serviceAccountName="mine",
    )
    assert pod["metadata"]["labels"] == {"team": "shop", **relay_labels("orders")}
    assert pod["metadata"]["annotations"]["note"] == "x"
    (container,) = pod["spec"]["containers"]
    names = [each["name"] for each in container["env"]]
    assert names == [
        "POD_NAME",
        "POD_NAMESPACE",
        "POD_UID",
        "POD_IP",
        "MAILBOAT_MANIFESTS",
        "MAILBOAT_SECRETS_DIR",
        "TZ",
    ]
    assert "fieldRef" in container["env"][0]["valueFrom"]
    relay_id = container["args"][container["args"].index("--relay-id") + 1]
    assert relay_id == "$(POD_NAMESPACE)/$(POD_NAME)", "pods of two namespaces may have one name, and share a database"
    assert container["securityContext"]["runAsUser"] == 1000
    assert "seccompProfile" not in container["securityContext"]
    assert container["resources"] == {"limits": {"cpu": "1"}}
    assert container["ports"][0]["containerPort"] == 9000
    assert "[::]:9000" in container["args"]
    assert pod["spec"]["nodeSelector"] == {"disk": "fast"}
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["spec"]["serviceAccountName"] == "mine"


def test_a_pod_is_not_killed_before_its_relay_has_drained():
    grace = pod_of()["spec"]["terminationGracePeriodSeconds"]
    timings = Timings()
    assert grace == DRAIN_SECONDS
    assert grace >= 2 * timings.drain_within, "a drain, and time for all that is closed after it"


def test_relays_are_spread_and_a_drained_node_takes_one_of_them_at_a_time():
    model = relay(replicas=3)
    made = deployment(model, IMAGE, [])["spec"]
    labels = made["template"]["metadata"]["labels"]
    spread = made["template"]["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for each in spread:
        assert (each["maxSkew"], each["whenUnsatisfiable"]) == (1, "ScheduleAnyway"), "never a reason not to run"
        assert each["labelSelector"]["matchLabels"].items() <= labels.items()
    budget = disruption_budget(model)["spec"]
    assert budget.pop("selector") == made["selector"]
    assert budget == {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    assert made["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_an_applications_pod_is_no_pod_of_ours():
    assert is_relay_pod(relay_labels("orders"))
    assert not is_relay_pod({"mailboat.dev/relay": "orders"})


def test_every_secret_that_a_sink_refers_to_is_mounted():
    kafka = {"bootstrapServers": ["kafka:9092"], "topic": "orders", "configSecretRef": {"name": "login"}}
    pubsub = {"project": "acme", "topic": "orders", "credentialsSecretRef": {"name": "account", "key": "k"}}
    subscriptions = [subscription(sink={"kafka": kafka}), subscription(sink={"pubsub": pubsub})]
    for each, expected in zip(subscriptions, [("login",), ("account",)], strict=True):
        assert sink_secrets(each) == secrets_in(each.manifest()) == expected


def test_volumes_of_secrets_have_names_that_kubernetes_takes():
    long = "a" * 200 + ".b"
    assert len(secret_volume(long)) <= 63
    assert "." not in secret_volume(long)
    assert secret_volume("a") != secret_volume("b")


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ({}, {CONFIG_MAP, SERVICE, SERVICE_ACCOUNT, DEPLOYMENT, DISRUPTION_BUDGET}),
        ({"template": {"serviceAccountName": "mine"}}, {CONFIG_MAP, SERVICE, DEPLOYMENT, DISRUPTION_BUDGET}),
        ({"runtime": "Sidecar"}, {CONFIG_MAP, SERVICE}),
    ],
)
def test_which_children_there_are(spec, kinds):
    children = desired(relay(**spec), [], Configuration(1, ""), "keys", IMAGE)
    assert set(children) == kinds
    for child in children.values():
        assert child["metadata"]["name"] == "orders-relay"
        assert owner_of(child, "orders", "u1") is Owner.OWN
        assert owner_of(child, "orders", "u2") is Owner.PREDECESSOR
        assert owner_of(child, "other", "u2") is Owner.FOREIGN
    assert owner_of({"metadata": {}}, "orders", "u1") is Owner.FOREIGN


def orphan(**changes):
    fields = [{"manager": "mailboat-operator", "operation": "Apply"}]
    metadata = {"name": "orders-relay", "labels": relay_labels("orders"), "managedFields": fields, **changes}
    return {"metadata": metadata}


THEIRS = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "x", "controller": True}]


@pytest.mark.parametrize(
    ("child", "owner"),
    [
        (orphan(), Owner.OWN),
        (orphan(ownerReferences=[]), Owner.OWN),
        (orphan(ownerReferences=THEIRS), Owner.FOREIGN),
        (orphan(labels={"mailboat.dev/relay": "orders"}), Owner.FOREIGN),
        (orphan(labels=relay_labels("other")), Owner.FOREIGN),
        (orphan(managedFields=[{"manager": "kubectl", "operation": "Apply"}]), Owner.FOREIGN),
        (orphan(managedFields=[{"manager": "mailboat-operator", "operation": "Update"}]), Owner.FOREIGN),
    ],
    ids=["orphan", "empty list", "another controller", "few labels", "other relay", "other manager", "not applied"],
)
def test_a_child_without_an_owner_that_we_created_is_ours(child, owner):
    assert owner_of(child, "orders", "new") is owner


# ---- configuration ------------------------------------------------------------------------------------------------


def configuration(subscriptions, before=None, now_ms=1, in_use=0, kept=()):
    items = [*map(item, subscriptions), *map(raw_item, kept)]
    return next_configuration(relay(), items, before, now_ms, in_use)


def resources_in(made):
    return json.loads(made.text)["items"]


def test_the_configuration_is_the_resources_with_a_version_and_nothing_else():
    made = configuration([subscription("b"), subscription("a")], now_ms=1000)
    first, *rest = resources_in(made)
    assert first["metadata"] == {
        "name": "orders",
        "namespace": "shop",
        "uid": "u1",
        "generation": 3,
        "annotations": {"mailboat.dev/config-version": "1000"},
    }
    assert [each["metadata"]["name"] for each in rest] == ["a", "b"]
    assert all(set(each) == {"apiVersion", "kind", "metadata", "spec"} for each in (first, *rest))
    assert configuration_in(config_map_content(made, "keys")) == made


SUBSETS = st.sets(st.sampled_from("abc")).map(lambda names: [subscription(name) for name in sorted(names)])


@given(st.lists(st.tuples(SUBSETS, st.integers(0, 10**6), st.integers(0, 10**6)), min_size=2, max_size=6))
def test_versions_rise_with_every_change_and_only_then(history):
    before, content = None, None
    for subscriptions, now_ms, in_use in history:
        made = configuration(subscriptions, before, now_ms, in_use)
        if before is not None and content == subscriptions and in_use <= before.version:
            assert made == before
        else:
            assert before is None or made.version > before.version
            assert made.version > in_use
        before, content = made, subscriptions


def test_a_version_from_the_far_future_is_not_believed():
    made = configuration([], now_ms=1000, in_use=2**62)
    assert made.version == 1000


GZIP_BOMB = base64.b64encode(gzip.compress(bytes(100_000_000), 1)).decode()


@pytest.mark.parametrize(
    "content",
    [
        {"data": {"resources.yaml": text}}
        for text in (None, "", "nonsense", "[" * 5000, alias_bomb(12), configuration([]).text.replace("\n", ""))
    ]
    + [{"binaryData": {"resources.yaml": content}} for content in (None, "", "!", "H4sI", GZIP_BOMB, 7)],
)
def test_a_config_map_of_another_writer_is_ignored(content):
    assert configuration_in(content) is configuration_in({}) is configuration_in(None) is None


@pytest.mark.parametrize("harm", ["[" * 100_000, "[" + "{}," * 1_000_000 + "{}]", '{"kind": 1}', "nonsense"])
def test_malicious_lines_are_skipped(harm):
    made = configuration([subscription("a"), subscription("b")])
    _, a, b = made.text.splitlines()[1:-1]
    text = made.text.replace(a, f'{{"metadata":{{"uid":"uid-b","name":"b","x":{harm}}}}},')
    tampered = configuration_in({"data": {"resources.yaml": text}})
    assert tampered == Configuration(made.version, text)
    assert json.dumps(last_valid_form(tampered, "uid-b"), separators=(",", ":")) == b
    assert last_valid_form(tampered, "uid-a") is None
    assert '"state":"Paused"' in all_paused(tampered, now_ms=2).text


def test_a_large_configuration_is_compressed_and_one_over_the_limit_is_reported():
    def of(count):
        sink = {"custom": {"type": "nats", "config": {"ballast": "x" * 60_000}}}
        return configuration([subscription(f"s{number}", sink) for number in range(count)])

    for made, packed in ((of(1), False), (of(40), True)):
        stored = config_map_content(made, "keys")
        assert ("binaryData" in stored, "resources.yaml" in stored["data"]) == (packed, not packed)
        assert configuration_in(stored) == made
        assert too_large(made, "orders") == ""
        assert len(json.dumps(stored)) < 1024 * 1024
    assert "it has 4706 KiB" in too_large(of(80), "orders")
    noise = {"custom": {"type": "nats", "config": {"ballast": random.Random(1).randbytes(1_000_000).hex()}}}
    assert "compressed" in too_large(configuration([subscription("a", noise), subscription("b", noise)]), "orders")


def test_every_written_manifest_can_be_read_down_to_the_deepest_level():
    def written(levels):
        deep: dict[str, object] = {}
        for _ in range(levels):
            deep = {"x": deep}
        try:
            sink = {"custom": {"type": "nats", "config": deep}}
            return configuration([subscription("deep", sink)])
        except (ValueError, RecursionError):  # the models support no deeper nesting
            return None

    made = next(made for levels in range(400, 200, -1) if (made := written(levels)) is not None)
    form = last_valid_form(made, "uid-deep")
    assert form is not None
    assert configuration([], made, now_ms=2, kept=[form]) is made


@pytest.mark.parametrize(
    ("version", "counts"),
    [
        ('"1"', True),
        ('"1768000000000"', True),
        (f'"{2**62 - 1}"', True),
        (f'"{2**62}"', False),
        ('"0"', False),
        ('"-5"', False),
        ('"99999999999999999999"', False),
        (f'"{"9" * 5000}"', False),
        ('"1_000"', False),
        ('" 7"', False),
        ('"\u0667"', False),
        ("7", False),
        ("true", False),
        ("Infinity", False),
        ("[7]", False),
        ("", False),
    ],
)
def test_a_version_that_relays_refuse_does_not_count_so_that_it_is_replaced(version, counts):
    text = configuration([]).text.replace(
        '"mailboat.dev/config-version":"1"', f'"mailboat.dev/config-version":{version}'
    )
    before = configuration_in({"data": {"resources.yaml": text}})
    assert (before is not None) == counts
    assert 0 < configuration([], before, now_ms=1000).version <= 2**62


def test_a_pause_of_all_changes_nothing_else_and_is_made_once():
    made = configuration([subscription("a"), subscription("b", state="Paused")], now_ms=1000)
    paused = all_paused(made, now_ms=500)
    assert configuration_in({"data": {"resources.yaml": paused.text}}) == paused
    assert paused.version == 1001
    expected = [subscription("a", state="Paused"), subscription("b", state="Paused")]
    assert resources_in(paused) == resources_in(configuration(expected, now_ms=1001))
    assert all_paused(paused, now_ms=9000) is paused
    assert all_paused(made, now_ms=9000).version == 9000


def test_the_last_valid_form_is_found_by_identity():
    made = configuration([subscription("a")])
    form = last_valid_form(made, "uid-a")
    assert form is not None
    assert EventSubscription.model_validate(form).spec == subscription("a").spec
    assert last_valid_form(made, "uid-of-another-that-had-the-name") is last_valid_form(None, "uid-a") is None


def test_the_last_valid_form_is_kept_unchanged_whether_readable_or_not():
    before = configuration([subscription("a"), subscription("b")])
    b = resources_in(before)[2]
    b["spec"]["ofAnotherVersion"] = {"at": ["2026-01-31", "\u2028\n\ud800"]}
    before = configuration([subscription("a")], kept=[b])
    form = last_valid_form(before, "uid-b")
    assert form is not None
    assert form == b
    made = configuration([subscription("a"), subscription("c")], before, now_ms=2, kept=[form])
    assert [each["metadata"]["name"] for each in resources_in(made)] == ["orders", "a", "b", "c"]
    assert last_valid_form(made, "uid-b") == b
    again = configuration([subscription("a"), subscription("c")], made, now_ms=3, kept=[form])
    assert again is made


def test_secrets_of_unreadable_manifests_are_found_by_field_names():
    known = subscription(
        sink={"kafka": {"bootstrapServers": ["k:9092"], "topic": "t", "configSecretRef": {"name": "s"}}}
    )
    document = known.manifest()
    document["spec"]["sink"]["kafka"]["ofAnotherVersion"] = True
    assert secrets_in(document) == sink_secrets(known) == ("s",)
    garbled: Mapping[str, object]
    for garbled in ({}, {"spec": []}, {"spec": {"sink": 1}}, {"spec": {"sink": {"kafka": {"configSecretRef": "s"}}}}):
        assert secrets_in(garbled) == ()


def test_a_relay_takes_the_configuration_of_an_operator_that_has_more_fields():
    class LaterFilter(Filter):
        hours: int = 24

    class LaterSpec(EventSubscriptionSpec):
        filter: LaterFilter = LaterFilter()
        urgency: str = "Normal"

    class LaterSubscription(EventSubscription):
        spec: LaterSpec

    later = LaterSubscription.model_validate(subscription("out", filter={"eventTypes": ["order.*"]}).manifest())
    assert {"urgency", "hours"} <= {*later.manifest()["spec"], *later.manifest()["spec"]["filter"]}
    made = configuration([later])
    read = read_documents((str(number), each) for number, each in enumerate(resources_in(made)))
    assert read.subscriptions[0].spec == subscription("out", filter={"eventTypes": ["order.*"]}).spec


@pytest.mark.parametrize("body", [relay().manifest(), subscription().manifest(), *COMPLETE])
def test_the_configuration_leaves_out_defaults_only(body):
    model = OutboxRelay if body["kind"] == "OutboxRelay" else EventSubscription
    resource = model.model_validate(body)
    spec = resource.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)["spec"]
    assert model.model_validate({**body, "spec": spec}) == resource
