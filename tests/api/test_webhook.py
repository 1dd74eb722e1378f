"""The webhook called by a real API server: pods get valid sidecars, and also start without one."""

from __future__ import annotations

import json
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mailboat_devservers.kubernetes import ApiServer
from support.operator_processes import IMAGE, RunningOperator, a_pod, a_relay, a_subscription, webhook_configuration
from support.wait import wait_until


@dataclass
class Shop:
    """A namespace with an operator whose webhook is called by the API server."""

    api: ApiServer
    namespace: str
    operator: RunningOperator

    def apply(self, *documents: dict[str, Any]) -> None:
        for document in documents:
            self.api.kubectl("apply", "--namespace", self.namespace, "--filename", "-", input=json.dumps(document))

    def create(self, pod: dict[str, Any], *flags: str) -> tuple[dict[str, Any], str]:
        """Create a pod. Return the stored pod and the warnings."""
        command = ("create", "--namespace", self.namespace, "--filename", "-", "--output", "json", *flags)
        answer = self.api.try_kubectl(*command, input=json.dumps(pod))
        assert answer.status == 0, answer.err
        return json.loads(answer.out), answer.err

    def sidecar_of(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        found = [each for each in pod["spec"].get("initContainers", ()) if each["name"] == "mailboat-relay"]
        return found[0] if found else None

    def wait_injecting(self) -> None:
        """Wait for the first injection. The API server applies a changed webhook configuration with a delay."""

        def injected() -> object:
            assert self.operator.process.poll() is None, f"the operator ended:\n{self.operator.text}"
            return self.sidecar_of(self.create(a_pod("probe"), "--dry-run=server")[0])

        wait_until(injected, timeout=60, what="the first injection")

    def injections(self, outcome: str) -> int:
        _, metrics = self.operator.get("/metrics")
        found = re.search(
            rf'^mailboat_operator_injections_total\{{outcome="{outcome}"\}} (\S+)$', metrics, re.MULTILINE
        )
        assert found is not None
        return int(float(found[1]))


@pytest.fixture(scope="module")
def shop(api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Shared by the tests of this module, because an operator takes seconds to start."""
    namespace = f"shop-{secrets.token_hex(4)}"
    api.kubectl("create", "namespace", namespace)
    with a_shop(api, namespace, tmp_path_factory.mktemp("shop")) as shop:
        yield shop


@contextmanager
def a_shop(api: ApiServer, namespace: str, folder: Path, *flags: str) -> Iterator[Shop]:
    operator = RunningOperator(folder, "one", api.kubeconfig, namespace, *flags)
    try:
        configuration = webhook_configuration(namespace, operator.address("webhook"))
        api.kubectl("create", "--filename", "-", input=json.dumps(configuration))
        shop = Shop(api, namespace, operator)
        shop.apply(a_relay(), a_subscription())
        shop.wait_injecting()
        yield shop
    finally:
        operator.end()
        api.kubectl("delete", "mutatingwebhookconfiguration", namespace)


def test_pods_get_sidecars_that_the_api_server_accepts(shop: Shop) -> None:
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "once": {"restartPolicy": "Never"},
        "with-setup": {"initContainers": [{**a_pod("x")["spec"]["containers"][0], "name": "setup"}]},
        "with-volumes": {"volumes": [{"name": "data", "emptyDir": {}}]},
        "on-the-node": {"hostNetwork": True, "containers": [{"name": "shop", "image": "shop:1"}]},
        "as-root": {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}},
        "with-pull-secrets": {"imagePullSecrets": [{"name": "pull"}]},
    }
    for name, spec in forms.items():
        pod, warnings = shop.create(a_pod(name, **spec))
        sidecar = shop.sidecar_of(pod)
        assert sidecar is not None, f"{name} has no sidecar"
        assert pod["spec"]["initContainers"][0] == sidecar
        assert sidecar["restartPolicy"] == "Always"
        assert sidecar["image"] == IMAGE
        assert "mailboat.dev/injected" in pod["metadata"]["annotations"]
        assert ("port 9808 of the node" in warnings) == (name == "on-the-node")
        mounted = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
        assert {each["secretName"] for each in mounted} == {"orders-db", "kafka-login"}
        assert all(each["optional"] for each in mounted)


def test_sidecars_run_in_restricted_namespaces(shop: Shop) -> None:
    label = "pod-security.kubernetes.io/enforce"
    shop.api.kubectl("label", "namespace", shop.namespace, f"{label}=restricted")
    try:
        loose = json.dumps(a_pod("loose", containers=[{"name": "shop", "image": "shop:1"}]))
        create = ("create", "--namespace", shop.namespace, "--dry-run=server", "--filename", "-")
        answer = wait_until(
            lambda: shop.api.try_kubectl(*create, input=loose),
            60,
            "the namespace to be restricted",
            met=lambda answer: "violates PodSecurity" in answer.err,
        )
        assert "mailboat-relay" not in answer.err
        pod, warnings = shop.create(a_pod("restricted"))
        assert shop.sidecar_of(pod) is not None
        assert not warnings
    finally:
        shop.api.kubectl("label", "namespace", shop.namespace, f"{label}-")


def test_a_dry_run_shows_the_sidecar_and_changes_nothing(shop: Shop) -> None:
    pod, _ = shop.create(a_pod("dry"), "--dry-run=server")
    assert shop.sidecar_of(pod) is not None
    assert shop.api.kubectl("get", "pod", "dry", "--namespace", shop.namespace, "--ignore-not-found") == ""


def test_an_injected_pod_created_again_is_left_as_it_is(shop: Shop) -> None:
    pod, _ = shop.create(a_pod("first"))
    again = {**pod, "metadata": {**a_pod("second")["metadata"], "annotations": pod["metadata"]["annotations"]}}
    asked = shop.injections("not_asked")
    copied, warnings = shop.create(again)
    assert copied["spec"]["initContainers"] == pod["spec"]["initContainers"]
    assert not warnings
    assert shop.injections("not_asked") == asked + 1


def test_a_pod_that_cannot_be_injected_is_created_unchanged_with_a_warning(shop: Shop) -> None:
    shop.apply(a_relay("apart", runtime="Deployment", replicas=1))
    before = shop.injections("left_out")
    for relay, remedy in (("nobody", "Create it, then restart the pod"), ("apart", "set runtime: Sidecar")):
        pod, warnings = shop.create(a_pod(f"of-{relay}", relay))
        assert shop.sidecar_of(pod) is None
        assert "annotations" not in pod["metadata"]
        assert f"Warning: mailboat: {'no ' if relay == 'nobody' else ''}OutboxRelay" in warnings
        assert remedy in warnings
    assert shop.injections("left_out") == before + 2


@pytest.mark.parametrize(
    ("form", "template", "field"),
    [
        ("greedy", {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}}, "resources.requests"),
        ("torn", {"securityContext": {"privileged": True}}, "allowPrivilegeEscalation"),
        ("confused", {"securityContext": {"runAsUser": "nobody"}}, "runAsUser"),
        ("empty", {"env": [{"name": "WHERE", "valueFrom": {}}]}, "valueFrom"),
    ],
)
def test_a_template_that_the_api_server_refuses_keeps_no_application_from_starting(
    shop: Shop, form: str, template: dict[str, Any], field: str
) -> None:
    """The webhook validates a sidecar by a dry run, because only the API server has these rules."""
    shop.apply(a_relay(form, template=template))
    pod, warnings = shop.create(a_pod(f"of-{form}", form))
    assert shop.sidecar_of(pod) is None
    assert f'the template of OutboxRelay "{form}" is invalid' in warnings
    assert field in warnings
    shop.apply(a_relay(form))
    assert shop.sidecar_of(shop.create(a_pod(f"of-corrected-{form}", form))[0]) is not None
    assert "trial" not in shop.api.kubectl("get", "deployments", "--namespace", shop.namespace, "--output", "name")


def test_a_policy_against_deployments_is_no_reason_to_leave_a_sidecar_out(shop: Shop) -> None:
    name = f"owners-{shop.namespace}"
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": ["apps"],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["deployments"],
                    }
                ],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": shop.namespace}},
            },
            "validations": [{"expression": "has(object.metadata.labels)", "message": "a Deployment needs an owner"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    unowned = (
        "create",
        "deployment",
        "unowned",
        "--image=x",
        "--namespace",
        shop.namespace,
        "--dry-run=client",
        "-ojson",
    )
    deployment = json.loads(shop.api.kubectl(*unowned))
    del deployment["metadata"]["labels"]
    try_it = ("create", "--namespace", shop.namespace, "--dry-run=server", "--filename", "-")
    shop.apply(policy, binding)
    try:
        wait_until(
            lambda: "needs an owner" in shop.api.try_kubectl(*try_it, input=json.dumps(deployment)).err,
            timeout=60,
            what="the policy to be heeded",
        )
        shop.apply(a_relay("policed"))
        pod, warnings = shop.create(a_pod("of-policed", "policed"))
        assert shop.sidecar_of(pod) is not None
        assert "invalid" not in warnings
        assert any("Dry run of a sidecar failed" in line["message"] for line in shop.operator.lines())
    finally:
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            shop.api.kubectl("delete", kind, name)


def test_a_pod_that_opts_out_gets_nothing(shop: Shop) -> None:
    pod = a_pod("without")
    pod["metadata"]["annotations"] = {"mailboat.dev/inject": "false"}
    created, warnings = shop.create(pod)
    assert shop.sidecar_of(created) is None
    assert not warnings


def test_the_next_pod_gets_the_secrets_of_a_new_subscription(shop: Shop) -> None:
    def mounted(pod: dict[str, Any]) -> set[str]:
        return {each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each}

    shop.apply(a_relay("invoices"))
    assert mounted(shop.create(a_pod("before", "invoices"))[0]) == {"orders-db"}
    shop.apply(a_subscription("invoices-to-kafka", "invoices"))
    assert mounted(shop.create(a_pod("after", "invoices"))[0]) == {"orders-db", "kafka-login"}


def test_without_the_webhook_pods_start_without_a_sidecar(api: ApiServer, namespace: str, tmp_path: Path) -> None:
    with a_shop(api, namespace, tmp_path) as shop:
        assert shop.operator.end() == 0
        pod, _ = shop.create(a_pod("alone"))
        assert shop.sidecar_of(pod) is None


def test_an_operator_that_stops_releases_the_lease_and_still_answers_for_a_while(
    api: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """API servers may call the operator until they learn that it stops. Those pods still need a sidecar."""
    with a_shop(api, namespace, tmp_path, "--shutdown-delay=5m") as shop:
        shop.operator.process.send_signal(signal.SIGTERM)
        wait_until(lambda: shop.operator.said("Leader lease released"), timeout=60, what="the lead to be given away")
        assert shop.operator.get("/readyz") == (503, "stopping\n")
        assert shop.operator.get("/livez")[0] == 200
        for number in range(3):
            assert shop.sidecar_of(shop.create(a_pod(f"late-{number}"))[0]) is not None
        assert shop.operator.end(signal.SIGTERM) == 128 + signal.SIGTERM, "a second signal ends it at once"


def test_the_sidecar_gets_no_api_token(
    api_with_controllers: ApiServer, controlled_namespace: str, tmp_path: Path
) -> None:
    """Kubernetes mounts the token of the pod's service account into every container, including injected ones."""
    with a_shop(api_with_controllers, controlled_namespace, tmp_path) as shop:
        pod, _ = shop.create(a_pod("with-account"))
        sources = {each["name"]: each for each in pod["spec"]["volumes"]}

        def token_sources(container: dict[str, Any], sources: dict[str, Any] = sources) -> list[dict[str, Any]]:
            return [
                sources[each["name"]]
                for each in container["volumeMounts"]
                if each["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
            ]

        (application,) = token_sources(pod["spec"]["containers"][0])
        assert "projected" in application, "there is no token to be kept away"
        sidecar = shop.sidecar_of(pod)
        assert sidecar is not None
        (empty,) = token_sources(sidecar)
        assert "emptyDir" in empty


def test_a_webhook_without_read_rights_admits_pods_with_a_warning(
    api: ApiServer, namespace: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """The operator's rights are limited to its own namespace: it has a certificate and leads, but can't read relays."""
    user = unique_name("blind")
    at_home = "leases.coordination.k8s.io,secrets"
    api.kubectl("create", "role", user, "-n", namespace, "--verb=get,create,update", f"--resource={at_home}")
    api.kubectl("create", "rolebinding", user, "-n", namespace, f"--role={user}", f"--user={user}")
    operator = RunningOperator(tmp_path, "blind", api.kubeconfig_for(user), namespace)
    try:
        operator.wait_ready()
        secret = json.loads(api.kubectl("get", "secret", "mailboat-webhook-cert", "-n", namespace, "-o", "json"))
        configuration = webhook_configuration(namespace, operator.address("webhook"), "Fail")
        configuration["webhooks"][0]["clientConfig"]["caBundle"] = secret["data"]["ca.crt"]
        api.kubectl("create", "--filename", "-", input=json.dumps(configuration))
        shop = Shop(api, namespace, operator)
        created = wait_until(
            lambda: "could not be added" in shop.create(a_pod("probe"), "--dry-run=server")[1],
            timeout=60,
            what="the webhook to be asked",
        )
        assert created
        assert shop.injections("failed") >= 1
        assert any("starts without its relay" in line["message"] for line in operator.lines())
    finally:
        operator.end()
        api.kubectl("delete", "mutatingwebhookconfiguration", namespace, "--ignore-not-found")
