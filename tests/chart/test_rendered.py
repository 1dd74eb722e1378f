"""The rendered chart: least privilege, restricted pods, unique names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mailboat_operator.resources.pod import APPLICATION, NAME_LABEL, PORT_NAME
from mailboat_operator.settings import options, read_settings
from mailboat_spec.names import INJECT_ANNOTATION, RELAY_LABEL, SUBSCRIPTION_LABEL
from support.helm_chart import CHART, NAMESPACE, ROOT, Document, names, one, rendered, variants

pytestmark = pytest.mark.api  # needs Helm, whose first build takes minutes

CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
}


@pytest.fixture(params=variants())
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def documents(variant: str) -> list[Document]:
    return rendered(variant)


def rules(documents: list[Document], kind: str = "") -> Iterator[tuple[Document, dict[str, Any]]]:
    for document in documents:
        if document["kind"].endswith("Role") and document["kind"].startswith(kind):
            for rule in document["rules"]:
                yield document, rule


def settings_of(documents: list[Document]) -> Any:
    """The operator's settings, parsed from the arguments in the chart."""
    container = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    command, *arguments = container["args"]
    assert command == "run"
    known = {option.opts[0]: option for option in options()}
    given: dict[str, Any] = {"operator_namespace": NAMESPACE}
    for argument in arguments:
        flag, _, value = argument.partition("=")
        option = known[flag]
        name = str(option.name)
        given[name] = (*given.get(name, ()), value) if option.multiple else value
    return read_settings(given)


# ---- names --------------------------------------------------------------------------------------------------------


def test_names_of_documents_are_unique(documents: list[Document]) -> None:
    assert max(Counter(names(document) for document in documents).values()) == 1


def test_documents_are_in_the_release_namespace_or_a_watched_one(documents: list[Document], variant: str) -> None:
    allowed = {NAMESPACE, *settings_of(documents).namespaces}
    for document in documents:
        if document["kind"] in CLUSTER_WIDE:
            assert "namespace" not in document["metadata"]
        else:
            assert document["metadata"]["namespace"] in allowed, names(document)
            if document["metadata"]["namespace"] != NAMESPACE:
                assert document["kind"] in ("Role", "RoleBinding")


def test_releases_of_one_name_in_two_namespaces_share_no_cluster_wide_names(variant: str) -> None:
    def cluster_wide(*arguments: str) -> set[tuple[str, str, str]]:
        return {
            names(document)
            for document in rendered(variant, *arguments)
            if document["kind"] in CLUSTER_WIDE - {"CustomResourceDefinition"}
        }

    assert not cluster_wide() & cluster_wide("--namespace", "elsewhere")


# ---- CRDs ---------------------------------------------------------------------------------------------------------


def test_the_crds_are_the_generated_ones_and_are_kept_by_an_uninstall() -> None:
    generated = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "crds").glob("*.yaml")}
    in_chart = {file.name: file.read_text(encoding="utf-8") for file in (CHART / "files/crds").glob("*.yaml")}
    assert in_chart == generated, "run `make crds`"
    wanted = [yaml.safe_load(text) for _, text in sorted(generated.items())]
    for crd in wanted:
        assert "annotations" not in crd["metadata"]
        crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    assert [each for each in rendered() if each["kind"] == "CustomResourceDefinition"] == wanted


@pytest.mark.parametrize(("setting", "count", "kept"), [("install=false", 0, False), ("keep=false", 2, False)])
def test_crds_can_be_left_out_or_removed_with_the_release(setting: str, count: int, kept: bool) -> None:
    crds = [each for each in rendered("default", "--set", f"crds.{setting}") if each["kind"].startswith("Custom")]
    assert len(crds) == count
    assert all(("annotations" in crd["metadata"]) is kept for crd in crds)


# ---- rights -------------------------------------------------------------------------------------------------------


def test_no_rule_has_a_wildcard(documents: list[Document]) -> None:
    for document, rule in rules(documents):
        for part in ("apiGroups", "resources", "verbs"):
            assert rule[part], names(document)
            assert "*" not in "".join(rule[part]), names(document)


def test_rules_for_secrets_name_the_operators_own_secrets(documents: list[Document]) -> None:
    settings = settings_of(documents)
    seen = False
    for document, rule in rules(documents):
        if "secrets" not in rule["resources"]:
            continue
        seen = True
        assert (document["kind"], document["metadata"]["namespace"]) == ("Role", NAMESPACE)
        if rule["verbs"] != ["create"]:  # RBAC can't restrict create by name
            certificate = [settings.webhook_secret] if settings.webhook_certs == "self" else []
            assert rule["resourceNames"] == [settings.signing_secret, *certificate]
            assert "list" not in rule["verbs"]
    assert seen


def test_roles_are_in_the_watched_namespaces(documents: list[Document], variant: str) -> None:
    watched = settings_of(documents).namespaces
    places = [
        document["metadata"].get("namespace")
        for document, rule in rules(documents)
        if "deployments" in rule["resources"]
    ]
    assert places == (list(watched) or [None])


def test_rules_name_one_lease_and_one_webhook_configuration(documents: list[Document]) -> None:
    settings = settings_of(documents)
    for document, rule in rules(documents):
        if "leases" in rule["resources"] and rule["verbs"] != ["create"]:
            assert rule["resourceNames"] == [settings.lease_name]
        if "mutatingwebhookconfigurations" in rule["resources"]:
            assert settings.webhook_certs == "self", names(document)
            assert rule["resourceNames"] == [settings.webhook_config_name]


def test_every_binding_binds_the_operators_account_to_an_existing_role(documents: list[Document]) -> None:
    account = one(documents, "ServiceAccount")
    roles = {names(document) for document in documents if document["kind"].endswith("Role")}
    bindings = [document for document in documents if document["kind"].endswith("Binding")]
    assert bindings
    for binding in bindings:
        role = binding["roleRef"]
        assert (role["kind"], binding["metadata"].get("namespace", ""), role["name"]) in roles
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": NAMESPACE}
        ]


def test_without_rbac_there_are_no_roles_and_bindings() -> None:
    documents = rendered("default", "--set", "rbac.create=false,rbac.aggregate=false")
    assert not [names(document) for document in documents if "Role" in document["kind"]]


# ---- pods ---------------------------------------------------------------------------------------------------------


def test_pods_pass_the_restricted_standard(documents: list[Document]) -> None:
    for pod in (one(documents, "Deployment")["spec"]["template"]["spec"], one(documents, "Pod")["spec"]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"requests", "limits"}


def test_ports_mounts_and_certificates_match_the_operators_settings(documents: list[Document], variant: str) -> None:
    settings = settings_of(documents)
    deployment = one(documents, "Deployment")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"] for mount in deployment["containers"][0]["volumeMounts"]}
    if settings.webhook_certs == "external":
        assert str(settings.cert_dir) in mounts
        certificate = one(documents, "Certificate", settings.webhook_secret)["spec"]
        assert set(certificate["dnsNames"]) <= set(settings.certificate_names)
        secret = next(volume["secret"] for volume in deployment["volumes"] if "secret" in volume)
        assert secret["secretName"] == certificate["secretName"]
    if settings.webhook_certs != "off":
        assert one(documents, "Service", settings.webhook_service)
    ports = {port["name"]: port["containerPort"] for port in deployment["containers"][0]["ports"]}
    assert str(settings.health_listen) == f":{ports['http']}"
    assert (settings.webhook_certs == "off") == ("webhook" not in ports)
    assert not ports.get("webhook") or str(settings.webhook_listen) == f":{ports['webhook']}"


def test_images_use_a_digest_if_one_is_set() -> None:
    documents = rendered("restricted")
    image = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"mailboat-operator@sha256:{'1' * 64}"
    assert settings_of(documents).relay_image == f"mailboat-relay@sha256:{'2' * 64}"


@pytest.mark.parametrize(("replicas", "budgets"), [(1, 0), (2, 1)])
def test_a_single_operator_has_no_disruption_budget_that_blocks_a_drain(replicas: int, budgets: int) -> None:
    documents = rendered("default", "--set", f"replicas={replicas}")
    assert sum(document["kind"] == "PodDisruptionBudget" for document in documents) == budgets


def test_selectors_select_the_operators_pods(documents: list[Document]) -> None:
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for document in documents:
        spec = document.get("spec", {})
        match document["kind"]:
            case "Service":
                selector = spec["selector"]
            case "Deployment" | "PodDisruptionBudget":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case _:
                continue
        assert selector.items() <= labels.items(), names(document)


RELAYS = {"namespaceSelector": {}, "podSelector": {"matchExpressions": [{"key": RELAY_LABEL, "operator": "Exists"}]}}
CONSUMERS = {
    "namespaceSelector": {},
    "podSelector": {"matchExpressions": [{"key": SUBSCRIPTION_LABEL, "operator": "Exists"}]},
}
NAMES = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def on(*ports: int | str) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def test_the_network_policy_allows_only_the_connections_of_the_operator() -> None:
    policy = one(rendered("everything"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": on("http")}, {"ports": on("webhook")}]
    assert policy["egress"] == [NAMES, {"ports": on(443, 6443)}, {"to": [RELAYS]}, {"to": [CONSUMERS]}]


def test_a_narrowed_network_policy_still_allows_helm_test() -> None:
    documents = rendered("restricted")
    policy = one(documents, "NetworkPolicy")["spec"]
    http, *webhook = policy["ingress"]
    prometheus, tester = http["from"]
    assert prometheus == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    tests = [each for each in documents if each["kind"] == "Pod"]
    assert tests
    for pod in tests:
        assert tester["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert webhook == [], "a rule for a webhook that is off"
    to_server = {"ports": on(443, 6443), "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    assert policy["egress"] == [NAMES, to_server, {"to": [RELAYS]}, {"to": [CONSUMERS]}]


# ---- webhook and monitors -----------------------------------------------------------------------------------------


def test_the_webhook_selects_only_pods_that_need_a_sidecar() -> None:
    webhook = one(rendered(), "MutatingWebhookConfiguration")["webhooks"][0]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["sideEffects"] == "None"
    assert webhook["reinvocationPolicy"] == "IfNeeded"
    assert webhook["timeoutSeconds"] <= 5
    conditions = {each["key"]: (each["operator"], each.get("values")) for each in selector(webhook, "object")}
    assert conditions == {RELAY_LABEL: ("Exists", None), NAME_LABEL: ("NotIn", [APPLICATION])}
    assert "kube-system" in selector(webhook, "namespace")[0]["values"]
    assert INJECT_ANNOTATION in webhook["matchConditions"][0]["expression"]


def selector(webhook: dict[str, Any], what: str) -> list[dict[str, Any]]:
    expressions: list[dict[str, Any]] = webhook[f"{what}Selector"]["matchExpressions"]
    return expressions


def test_the_chart_sets_no_ca_bundle(documents: list[Document]) -> None:
    for document in documents:
        for webhook in document.get("webhooks", ()):
            assert "caBundle" not in webhook["clientConfig"]


def test_cert_manager_injects_the_bundle_of_its_certificate() -> None:
    documents = rendered("cert-manager")
    certificate = one(documents, "Certificate", "mailboat-webhook-cert")
    annotations = one(documents, "MutatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations["cert-manager.io/inject-ca-from"] == f"{NAMESPACE}/{certificate['metadata']['name']}"
    given = one(rendered("everything"), "Certificate")["spec"]["issuerRef"]
    assert given == {"kind": "ClusterIssuer", "name": "internal"}


def test_a_serving_certificate_of_cert_manager_is_trusted_before_and_after_its_renewal() -> None:
    """Its CA outlives it and keeps its key. The renewal of a self-signed certificate would leave a gap."""
    documents = rendered("cert-manager")
    serving = one(documents, "Certificate", "mailboat-webhook-cert")["spec"]
    issuer = one(documents, "Issuer", serving["issuerRef"]["name"])["spec"]
    (authority,) = (each["spec"] for each in documents if each["kind"] == "Certificate" and each["spec"].get("isCA"))
    assert issuer == {"ca": {"secretName": authority["secretName"]}}
    assert authority["secretName"] != serving["secretName"]
    assert one(documents, "Issuer", authority["issuerRef"]["name"])["spec"] == {"selfSigned": {}}
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    hours = [int(each.removesuffix("h")) for each in (authority["renewBefore"], serving["duration"])]
    assert hours[0] > hours[1], "a certificate outlives its CA"
    assert not [each for each in rendered("everything") if each["kind"] == "Issuer"], "an issuer beside the given one"


def test_monitors_name_existing_ports() -> None:
    documents = rendered("everything")
    service = one(documents, "Service", "mailboat-operator")
    monitor = one(documents, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]
    relays = one(documents, "PodMonitor", "mailboat-relays")["spec"]
    assert relays["selector"] == {"matchExpressions": [{"key": RELAY_LABEL, "operator": "Exists"}]}
    assert [endpoint["port"] for endpoint in relays["podMetricsEndpoints"]] == [PORT_NAME]
    assert relays["namespaceSelector"] == {"any": True}
    narrow = rendered("namespaced", "--set", "metrics.relays.podMonitor.enabled=true")
    assert one(narrow, "PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["shop", "billing"]}


def test_resources_of_third_party_crds_are_off_by_default() -> None:
    groups = {document["apiVersion"].split("/")[0] for document in rendered() if "/" in document["apiVersion"]}
    assert not [group for group in groups if re.search(r"coreos|cert-manager", group)]
