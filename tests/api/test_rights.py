"""The rights of the chart: the operator needs every right that is granted, and no other one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mailboat_devservers.kubernetes import ApiServer, start_api_server
from mailboat_operator.resources.pod import CONTAINER
from support.crd_definitions import until_established
from support.helm_chart import CHART, NAMESPACE, RELEASE, Document, one, rendered, values_of
from support.operator_processes import RunningOperator, a_pod, a_relay, a_subscription
from support.stub_relays import Outbox, RelayStandIn
from support.wait import wait_until

UNUSED = {
    # For clusters that enable OwnerReferencesPermissionEnforcement. The operator never writes finalizers.
    ("update", "outboxrelays/finalizers"),
    # Certificates and keys are renewed after weeks.
    ("update", "secrets"),
}
"""Granted rights that the test below does not use, with the reason for the grant."""

Right = tuple[str, str]


class ChartOperator(RunningOperator):
    """Runs with the arguments of the chart's Deployment, except for addresses, intervals and the kubeconfig."""

    def _flags(self, kubeconfig: Path, namespace: str, flags: Sequence[str]) -> list[str]:
        return [
            *flags,
            f"--kubeconfig={kubeconfig}",
            f"--operator-namespace={namespace}",
            "--webhook-listen=127.0.0.1:0",
            "--webhook-host=127.0.0.1",
            "--health-listen=127.0.0.1:0",
            "--shutdown-delay=0s",
            "--lease-duration=60s",
            "--status-interval=1s",
            "--log-format=json",
        ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, or_skip: Callable[..., ApiServer]) -> Iterator[ApiServer]:
    place = tmp_path_factory.mktemp("rights")
    with or_skip(lambda: start_api_server(place, controllers=True, audit=True)) as server:
        for name in (NAMESPACE, "shop", "billing"):
            server.kubectl("create", "namespace", name)
        yield server


@pytest.fixture(params=["default", "namespaced"])
def variant(request: pytest.FixtureRequest, cluster: ApiServer) -> Iterator[str]:
    """A variant of the chart, installed. The release is removed after the test."""
    name: str = request.param
    where = ("--namespace", NAMESPACE, "--values", str(values_of(name)))
    cluster.helm("install", RELEASE, str(CHART), *where)
    until_established(cluster, "crd", "--all")
    yield name
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE)
    cluster.kubectl("delete", "outboxrelays,eventsubscriptions,pods", "--all", "--namespace", "shop")
    cluster.kubectl("delete", "secrets,leases", "--all", "--namespace", NAMESPACE)


def granted(documents: list[Document], account: str) -> set[Right]:
    """Return (verb, resource) of all rules that are bound to the account."""
    bound = {
        (each["roleRef"]["kind"], each["roleRef"]["name"])
        for each in documents
        if any(subject["name"] == account for subject in each.get("subjects", ()))
    }
    return {
        (verb, resource)
        for each in documents
        if (each["kind"], each["metadata"]["name"]) in bound
        for rule in each["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }


async def test_the_rights_of_the_chart_are_enough_and_all_of_them_are_used(
    cluster: ApiServer, variant: str, tmp_path: Path
) -> None:
    documents = await asyncio.to_thread(rendered, variant)
    account = one(documents, "ServiceAccount")["metadata"]["name"]
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    arguments = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"][1:]
    mark = cluster.bookmark()
    token = await asyncio.to_thread(cluster.kubeconfig_for_service_account, NAMESPACE, account)
    operator = ChartOperator(tmp_path, "operator", token, NAMESPACE, *arguments)
    sidecar = RelayStandIn(Outbox(), "injected", "shop", tmp_path / "operator-keys.pem")
    await sidecar.start()
    try:
        await asyncio.to_thread(operator.wait_leading)
        await asyncio.to_thread(live_through_everything, cluster, operator, sidecar, tmp_path)
        assert (await asyncio.to_thread(operator.get, "/livez"))[0] == 200
    finally:
        await asyncio.to_thread(operator.end)
        await sidecar.stop()
    requests = cluster.requests(user=user, after=mark)
    assert not [str(request) for request in requests if request.code == 403]
    used = {(request.verb, request.resource) for request in requests}
    # A server-side apply that creates an object is a patch that also needs the right to create.
    used |= {("create", request.resource) for request in requests if (request.verb, request.code) == ("patch", 201)}
    assert granted(documents, account) - used == UNUSED


def live_through_everything(cluster: ApiServer, operator: RunningOperator, sidecar: RelayStandIn, place: Path) -> None:
    def kubectl(*arguments: str, input: str | None = None) -> str:
        return cluster.kubectl(*arguments, "--namespace", "shop", input=input)

    def apply(*manifests: dict[str, Any]) -> None:
        kubectl("apply", "--filename", "-", input=yaml.safe_dump_all(manifests))

    def children(*kinds: str) -> set[str]:
        found = kubectl("get", ",".join(kinds), "--selector", "mailboat.dev/relay=orders", "--output", "name")
        return {line.partition("/")[0].partition(".")[0] for line in found.split()}

    every = {"deployment", "configmap", "service", "serviceaccount", "poddisruptionbudget"}

    # The operator writes the caBundle, and creates the children of a relay.
    apply(a_relay(runtime="Deployment", replicas=2), a_subscription())
    eventually(lambda: children(*every) == every, "all children of a Deployment")
    eventually(lambda: conditions(kubectl, "outboxrelay/orders"), "a status of the relay")
    eventually(lambda: conditions(kubectl, "eventsubscription/to-kafka"), "a status of the subscription")
    eventually(lambda: "caBundle" in cluster.kubectl("get", "mutatingwebhookconfigurations", "-o", "yaml"), "a bundle")

    # Changes by other clients are reverted.
    kubectl("delete", "service", "orders-relay")
    eventually(lambda: children(*every) == every, "the Service to be put back")
    kubectl("scale", "deployment", "orders-relay", "--replicas=0")
    replicas = ("get", "deployment", "orders-relay", "--output", "jsonpath={.spec.replicas}")
    eventually(lambda: kubectl(*replicas) == "2", "the number of replicas to be put back")

    # A pod that requests a sidecar and has none is reported.
    apply(a_relay(runtime="Sidecar"))
    pod = a_pod("lacking")
    labels = pod["metadata"].pop("labels")
    kubectl("create", "--filename", "-", input=json.dumps(pod))
    kubectl("label", "pod", "lacking", *(f"{key}={value}" for key, value in labels.items()))
    eventually(lambda: "SidecarMissing" in kubectl("get", "events"), "the missing sidecar to be reported")

    # The next pod gets a sidecar. No pods run here, so the API server can't call a Service: configure a URL instead.
    name = cluster.kubectl("get", "mutatingwebhookconfigurations", "--output", "name").strip()
    address = [
        {"op": "remove", "path": "/webhooks/0/clientConfig/service"},
        {"op": "add", "path": "/webhooks/0/clientConfig/url", "value": f"https://{operator.address('webhook')}/inject"},
        {"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 30},
    ]
    cluster.kubectl("patch", name, "--type=json", "--patch", json.dumps(address))
    wanting = json.dumps(a_pod(sidecar.pod))
    # Until the API server has the new URL, it may reject every pod: one variant sets failurePolicy Fail.
    dry_run = ("create", "--dry-run=server", "--output=yaml", "--filename", "-", "--namespace", "shop")
    eventually(lambda: CONTAINER in cluster.try_kubectl(*dry_run, input=wanting).out, "the webhook to be called")
    kubectl("create", "--filename", "-", input=wanting)

    # When the first sidecar is ready, the Deployment and the children that only a Deployment needs are deleted.
    keys = ("get", "configmap", "orders-relay", "--output", r"jsonpath={.data.operator-keys\.pem}")
    (place / "operator-keys.pem").write_text(kubectl(*keys))
    sidecar.uid = kubectl("get", "pod", sidecar.pod, "--output", "jsonpath={.metadata.uid}")
    status = {"status": {"podIP": sidecar.ip, "podIPs": [{"ip": sidecar.ip}], "phase": "Running"}}
    kubectl("patch", "pod", sidecar.pod, "--subresource=status", "--type=merge", "--patch", json.dumps(status))
    eventually(lambda: children(*every) == {"configmap", "service"}, "what only a Deployment needs to go")
    assert sidecar.configs
    assert not sidecar.refused


def eventually(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, timeout=60, what=what)


def conditions(kubectl: Callable[..., str], what: str) -> str:
    return kubectl("get", what, "--output", "jsonpath={.status.conditions[*].type}")
