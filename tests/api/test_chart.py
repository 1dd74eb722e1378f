"""The chart on a real API server.

The server accepts the rendered manifests. The granted rights are sufficient and minimal. An upgrade or an uninstall
removes no object that the chart does not own.

The tests start their own servers, because a release contains cluster-wide objects.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mailboat_devservers.golang import module_sources
from mailboat_devservers.kubernetes import ApiServer, CommandFailed, start_api_server
from support.crd_definitions import until_established, until_served
from support.helm_chart import CHART, NAMESPACE, RELEASE, ROOT, manifest, one, rendered, values_of, variants
from support.wait import wait_until

OTHERS_KINDS = {
    "github.com/prometheus-operator/prometheus-operator": [
        f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
        for kind in ("podmonitors", "prometheusrules", "servicemonitors")
    ],
    "github.com/cert-manager/cert-manager": [
        f"deploy/crds/cert-manager.io_{kind}.yaml" for kind in ("certificates", "issuers")
    ],
}
"""CRD files of the foreign kinds that the chart creates on request, by Go module."""

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:mailboat-operator"
CRDS = ["eventsubscriptions.mailboat.dev", "outboxrelays.mailboat.dev"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, or_skip: Callable[..., Any]) -> Iterator[ApiServer]:
    """An API server without the Mailboat kinds but with the foreign ones. Its namespaces admit restricted pods only."""
    place = tmp_path_factory.mktemp("chart")
    definitions = or_skip(others_definitions)
    with or_skip(lambda: start_api_server(place, controllers=True)) as server:
        for file in definitions:
            server.kubectl("create", "--filename", str(file))
            until_established(server, "--filename", str(file))
        for name in (NAMESPACE, "shop", "billing", "other"):
            server.kubectl("create", "namespace", name)
            server.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        yield server


def others_definitions() -> list[Path]:
    return [module_sources("definitions", owner) / file for owner, files in OTHERS_KINDS.items() for file in files]


@pytest.fixture
def release(cluster: ApiServer) -> Iterator[Callable[..., str]]:
    """``release("install", "--set", "replicas=2")`` runs helm. The release and the CRDs are removed after the test."""

    def run(verb: str, *arguments: str, chart: Path = CHART, variant: str = "default") -> str:
        where = (RELEASE, str(chart), "--namespace", NAMESPACE, "--values", str(values_of(variant)))
        return cluster.helm(verb, *where, *arguments)

    yield run
    try:
        cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found")
    finally:
        cluster.kubectl("delete", "crd", *CRDS, "--ignore-not-found")


# ---- accepted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", variants())
def test_every_variant_is_accepted_by_the_server(cluster: ApiServer, variant: str) -> None:
    documents = rendered(variant)
    answer = cluster.try_kubectl(
        "apply", "--dry-run=server", "--validate=strict", "--filename", "-", input=yaml.safe_dump_all(documents)
    )
    assert answer.status == 0, answer.err
    # No warnings either: unknown fields, old versions, pods that the namespace's security standard would reject.
    assert answer.err == ""
    assert answer.out.count("(server dry run)") == len(documents)


@pytest.mark.parametrize("variant", variants())
def test_the_operators_pods_may_run_where_only_restricted_ones_may(cluster: ApiServer, variant: str) -> None:
    documents = rendered(variant)
    account = one(documents, "ServiceAccount")
    account["metadata"]["namespace"] = "other"  # a namespace without a release
    cluster.kubectl("apply", "--filename", "-", input=yaml.safe_dump(account))
    template = one(documents, "Deployment")["spec"]["template"]
    template["spec"].pop("priorityClassName", None)  # the class is the cluster's, not the chart's
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = {**template["metadata"], "name": "operator", "namespace": "other"}
    cluster.kubectl("create", "--dry-run=server", "--filename", "-", input=yaml.safe_dump(pod))
    pod["spec"]["securityContext"]["runAsNonRoot"] = False
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        cluster.kubectl("create", "--dry-run=server", "--filename", "-", input=yaml.safe_dump(pod))


# ---- rights -------------------------------------------------------------------------------------------------------


def granted(cluster: ApiServer, user: str, *questions: tuple[str, str, str]) -> list[bool]:
    """Return whether ``user`` may do each (verb, resource.group/subresource, namespace). "" means all namespaces."""
    reviews = []
    for verb, resource, namespace in questions:
        plural, _, sub = resource.partition("/")
        plural, _, group = plural.partition(".")
        wanted = {"verb": verb, "resource": plural, "group": group, "subresource": sub, "namespace": namespace}
        # Groups of every service account. For other users the groups grant none of the rights that are reviewed here.
        spec = {
            "user": user,
            "groups": ["system:authenticated", "system:serviceaccounts"],
            "resourceAttributes": wanted,
        }
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    answered = cluster.kubectl("create", "--filename", "-", "--output=jsonpath={.status.allowed} ", input=text).split()
    assert len(answered) == len(questions)
    return [each == "true" for each in answered]


def until_granted(cluster: ApiServer, user: str, *questions: tuple[str, str, str]) -> None:
    """Wait until the API server's authorization cache has the rights of the release."""
    wait_until(lambda: granted(cluster, user, *questions), what=f"the rights of {user}", met=all)


NEEDED = [
    ("watch", "outboxrelays.mailboat.dev"),
    ("patch", "eventsubscriptions.mailboat.dev/status"),
    ("create", "deployments.apps"),
    ("patch", "configmaps"),
    ("delete", "poddisruptionbudgets.policy"),
    ("list", "pods"),
    ("create", "events.events.k8s.io"),
]
REFUSED = [
    ("create", "pods"),
    ("create", "pods/exec"),
    ("patch", "outboxrelays.mailboat.dev"),
    ("create", "roles.rbac.authorization.k8s.io"),
    ("create", "serviceaccounts/token"),
    ("impersonate", "users"),
    ("list", "mutatingwebhookconfigurations.admissionregistration.k8s.io"),
    ("get", "nodes"),
]


def test_the_operator_may_do_its_work_everywhere_and_nothing_else(
    cluster: ApiServer, release: Callable[..., str]
) -> None:
    release("install")
    until_granted(cluster, ACCOUNT, *((verb, resource, "") for verb, resource in NEEDED))
    for namespace in ("", "shop", NAMESPACE):
        answers = granted(cluster, ACCOUNT, *((verb, resource, namespace) for verb, resource in REFUSED))
        assert not any(answers), (namespace, answers)


def test_the_operator_can_not_read_or_write_an_applications_secret(
    cluster: ApiServer, release: Callable[..., str]
) -> None:
    release("install")
    until_granted(cluster, ACCOUNT, ("create", "secrets", NAMESPACE))
    verbs = ("get", "list", "watch", "update", "patch", "delete")
    assert not any(granted(cluster, ACCOUNT, *((verb, "secrets", place) for verb in verbs for place in ("", "shop"))))
    assert not any(granted(cluster, ACCOUNT, *((verb, "secrets", NAMESPACE) for verb in verbs)))
    assert granted(cluster, ACCOUNT, ("create", "secrets", NAMESPACE), ("create", "secrets", "shop")) == [True, False]
    # The same question with `kubectl auth can-i`.
    command = ("auth", "can-i", "get", "secrets", "--namespace", "shop", "--as", ACCOUNT)
    assert cluster.try_kubectl(*command).out == "no\n"


def test_an_operator_for_two_namespaces_has_no_rights_in_a_third(
    cluster: ApiServer, release: Callable[..., str]
) -> None:
    release("install", variant="namespaced")
    user = f"system:serviceaccount:{NAMESPACE}:mailboat-outbox-operator"
    until_granted(
        cluster, user, *((verb, resource, place) for verb, resource in NEEDED for place in ("shop", "billing"))
    )
    for namespace, allowed in [("shop", True), ("billing", True), ("other", False), (NAMESPACE, False), ("", False)]:
        answers = granted(cluster, user, *((verb, resource, namespace) for verb, resource in NEEDED))
        assert set(answers) == {allowed}, (namespace, answers)


def test_editors_of_a_namespace_may_edit_its_relays_and_viewers_may_read_them(
    cluster: ApiServer, release: Callable[..., str]
) -> None:
    release("install")
    for role, user in (("view", "viewer"), ("edit", "editor")):
        binding = ("create", "rolebinding", f"{role}-shop", f"--clusterrole={role}", f"--user={user}")
        cluster.kubectl(*binding, "--namespace", "shop")
    kind = "eventsubscriptions.mailboat.dev"
    get, create = ("get", kind, "shop"), ("create", kind, "shop")
    # The aggregation controller copies the chart's rules into the roles `view` and `edit`.
    wait_until(lambda: granted(cluster, "viewer", get) + granted(cluster, "editor", get, create) == [True] * 3)
    viewer, editor = granted(cluster, "viewer", get, create), granted(cluster, "editor", get, create)
    cluster.kubectl("delete", "rolebinding", "view-shop", "edit-shop", "--namespace", "shop")
    assert (viewer, editor) == ([True, False], [True, True])


# ---- upgrade and uninstall ----------------------------------------------------------------------------------------


def webhook_of(cluster: ApiServer) -> dict[str, Any]:
    name = one(rendered(), "MutatingWebhookConfiguration")["metadata"]["name"]
    found: dict[str, Any] = json.loads(
        cluster.kubectl("get", "mutatingwebhookconfiguration", name, "--output", "json")
    )["webhooks"][0]
    return found


def test_an_upgrade_leaves_the_certificate_authority_that_the_operator_wrote(
    cluster: ApiServer, release: Callable[..., str]
) -> None:
    release("install")
    name = one(rendered(), "MutatingWebhookConfiguration")["metadata"]["name"]
    bundle = base64.b64encode(
        b"-----BEGIN CERTIFICATE-----\n"
        b"MIIBbDCCARKgAwIBAgIBATAKBggqhkjOPQQDAjATMREwDwYDVQQDDAhtYWlsYm9hdDAeFw0y\n"
        b"-----END CERTIFICATE-----\n"
    ).decode()
    patch = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
    written = cluster.try_kubectl(
        "patch", "mutatingwebhookconfiguration", name, "--type=json", "--patch", json.dumps(patch)
    )
    assert written.status == 0, written.err
    release("upgrade", "--set", "webhook.timeoutSeconds=4,webhook.failurePolicy=Fail")
    webhook = webhook_of(cluster)
    assert (webhook["timeoutSeconds"], webhook["failurePolicy"]) == (4, "Fail")
    assert webhook["clientConfig"]["caBundle"] == bundle


def test_an_upgrade_brings_new_fields_of_the_resources(
    cluster: ApiServer, release: Callable[..., str], tmp_path: Path
) -> None:
    older = tmp_path / "mailboat"
    shutil.copytree(CHART, older)
    for file in (older / "files/crds").iterdir():
        crd = yaml.safe_load(file.read_text(encoding="utf-8"))
        del crd["spec"]["names"]["shortNames"]
        file.write_text(yaml.safe_dump(crd, sort_keys=False), encoding="utf-8")
    release("install", chart=older)
    assert short_names(cluster) == []
    release("upgrade")
    assert short_names(cluster) == ["evs", "obr"]


def short_names(cluster: ApiServer) -> list[str]:
    crds = json.loads(cluster.kubectl("get", "crd", *CRDS, "--output", "json"))["items"]
    return [name for crd in crds for name in crd["spec"]["names"].get("shortNames", ())]


def test_uninstall_removes_all_but_the_crds_and_user_objects(cluster: ApiServer, release: Callable[..., str]) -> None:
    release("install")
    until_established(cluster, "crd", *CRDS)
    until_served(cluster)
    relay = """
        {"apiVersion": "mailboat.dev/v1alpha1", "kind": "OutboxRelay", "metadata": {"name": "orders", "namespace":
        "shop"}, "spec": {"database": {"urlSecretRef": {"name": "orders-db", "key": "url"}}}}
    """
    cluster.kubectl("create", "--filename", "-", input=relay)
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
    assert cluster.kubectl("get", "outboxrelays", "--namespace", "shop", "--output", "name").split() == [
        "outboxrelay.mailboat.dev/orders"
    ]
    removed = [document for document in rendered() if document["kind"] not in ("CustomResourceDefinition", "Pod")]
    left = cluster.kubectl(
        "get", "--ignore-not-found", "--output", "name", "--filename", "-", input=yaml.safe_dump_all(removed)
    )
    assert left == ""
    # The next install adopts the CRDs without an error.
    release("install")
    cluster.kubectl("delete", "outboxrelay", "orders", "--namespace", "shop")


def test_install_refusal_and_uninstall_print_the_documented_output(
    cluster: ApiServer, release: Callable[..., str]
) -> None:
    shown = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL | re.MULTILINE)
    installed = release("install").split("NOTES:\n", 1)[1]
    with pytest.raises(CommandFailed) as refusal:
        release("upgrade", "--set", "replica=2")
    removed = cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE)
    assert [installed.strip(), refusal.value.answer.err.strip(), removed.strip()] == [text.strip() for text in shown]


def test_the_resources_in_the_notes_are_accepted(cluster: ApiServer, release: Callable[..., str]) -> None:
    notes = release("install")
    until_established(cluster, "crd", *CRDS)
    until_served(cluster)
    text = notes.split("<<'END'\n", 1)[1].split("     END", 1)[0]
    lines = [line.removeprefix("     ") for line in text.splitlines()]
    answer = cluster.try_kubectl("apply", "--dry-run=server", "--filename", "-", input="\n".join(lines))
    assert answer.status == 0, answer.err
    assert "orders-to-kafka created" in answer.out


def test_helm_sends_the_kinds_of_the_rendered_manifest(release: Callable[..., str], cluster: ApiServer) -> None:
    release("install")
    sent = cluster.helm("get", "manifest", RELEASE, "--namespace", NAMESPACE)
    kinds = sorted(document["kind"] for document in yaml.safe_load_all(sent) if document)
    checked = [document["kind"] for document in yaml.safe_load_all(manifest()) if document]
    checked.remove("Pod")  # a hook of `helm test`
    assert kinds == sorted(checked)
