"""An operator that the API server throttles, by the server's own flow control.

A priority level without seats still admits one request if no other request of that level runs. The tests occupy this
seat with a request that hangs in admission, on a webhook that never responds. All other requests of that level are
rejected with 429.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, RELAY, Kube
from mailboat_operator.kube.errors import KubeError, Throttled
from support.operator_under_test import operating
from support.wait import await_until

NO_SEATS = """
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: PriorityLevelConfiguration
metadata: {{name: {user}}}
spec:
  type: Limited
  limited:
    {{nominalConcurrencyShares: 0, lendablePercent: 0, borrowingLimitPercent: 0, limitResponse: {{type: Reject}}}}
---
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: FlowSchema
metadata: {{name: {user}}}
spec:
  priorityLevelConfiguration: {{name: {user}}}
  matchingPrecedence: 2
  distinguisherMethod: {{type: ByUser}}
  rules:
    - subjects: [{{kind: User, user: {{name: {user}}}}}]
      resourceRules:
        - {{verbs: ["*"], apiGroups: ["*"], resources: ["*"], clusterScope: true, namespaces: ["*"]}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {{name: {user}}}
webhooks:
  - name: silent.example.com
    clientConfig: {{url: "https://127.0.0.1:{port}/"}}
    rules: [{{operations: [CREATE], apiGroups: [""], apiVersions: [v1], resources: [configmaps]}}]
    namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {namespace}}}}}
    objectSelector: {{matchLabels: {{takes: the-seat}}}}
    failurePolicy: Ignore
    sideEffects: None
    admissionReviewVersions: [v1]
    timeoutSeconds: 30
"""


class Crowd:
    """Occupies the only seat of a user's requests, and releases it."""

    def __init__(self, kube, namespace):
        self._kube = kube
        self._namespace = namespace
        self._held = set()
        self._sitting = None

    async def wait_in_silence(self, reader, writer):
        """Accept webhook calls and never respond."""
        self._held.add(writer)
        try:
            while await reader.read(1024):
                pass
        except ConnectionError:
            pass
        finally:
            self._held.discard(writer)
            writer.close()

    async def come(self):
        self._sitting = asyncio.create_task(self._sit())
        await await_until(self._is_crowded, timeout=60, what="a request that hangs, and others that are refused for it")

    async def _is_crowded(self):
        if not self._held:
            return False
        try:
            await self._kube.list(CONFIG_MAP, self._namespace)
        except Throttled as refusal:
            return (refusal.retry_after or 0) >= 1  # the server names a time to come back
        # The hanging request began before the server applied the priority level, and occupies no seat of it.
        await self.go()
        self._sitting = asyncio.create_task(self._sit())
        return False

    async def go(self):
        if self._sitting is not None:
            self._sitting.cancel()
            await asyncio.gather(self._sitting, return_exceptions=True)
        for writer in list(self._held):
            writer.close()
        self._held.clear()

    async def _sit(self):
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"generateName": "seat-", "namespace": self._namespace, "labels": {"takes": "the-seat"}},
        }
        while True:
            with suppress(KubeError):  # throttled as well, until the seat is free
                await self._kube.create(CONFIG_MAP, body)
            await asyncio.sleep(0.02)


@pytest.fixture
async def user(api, cluster, unique_name):
    """A user with all rights outside group system:masters. Requests of that group are never throttled."""
    name = unique_name("throttled")
    rights = ("create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--user={name}")
    await asyncio.to_thread(api.kubectl, *rights)
    yield name
    kinds = "flowschema,prioritylevelconfiguration,mutatingwebhookconfiguration,clusterrolebinding"
    await asyncio.to_thread(api.kubectl, "delete", "--ignore-not-found", kinds, name)


@pytest.fixture
async def crowd(api, cluster, user):
    kube = await Kube.connect(await asyncio.to_thread(api.kubeconfig_for, user, ()))
    crowd = Crowd(kube, cluster.namespace)
    async with await asyncio.start_server(crowd.wait_in_silence, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        manifests = NO_SEATS.format(user=user, namespace=cluster.namespace, port=port)
        await asyncio.to_thread(api.kubectl, "apply", "--filename=-", input=manifests)
        yield crowd
        await crowd.go()
    await kube.close()


def refusals(registry):
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels.get("code") == "429" and sample.name.endswith("_total")
    )


async def test_a_throttled_operator_waits_and_continues(cluster, user, crowd):
    await cluster.create_relay()
    await crowd.come()
    async with operating(cluster, user=user, groups=()) as registry:
        await await_until(lambda: refusals(registry) >= 3, timeout=60, what="refusals from the first request on")
        await crowd.go()
        await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the children", timeout=60)
        await replicas_become(cluster, 3)  # reported by a list
        await replicas_become(cluster, 4)  # reported by an open watch

        before = refusals(registry)
        await crowd.come()
        await cluster.patch(RELAY, "orders", {"spec": {"replicas": 5}})
        await await_until(lambda: refusals(registry) > before, timeout=60, what="refusals in the middle of its work")
        await crowd.go()
        await replicas_become(cluster, 6)


async def replicas_become(cluster, wanted):
    await cluster.patch(RELAY, "orders", {"spec": {"replicas": wanted}})
    await cluster.until(
        DEPLOYMENT, "orders-relay", lambda it: it["spec"]["replicas"] == wanted, f"{wanted} replicas", timeout=60
    )
