"""The operator with exactly the rights of the chart: the audit log shows no forbidden request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, RELAY, SERVICE_ACCOUNT, SUBSCRIPTION, Kube
from support.operator_under_test import Cluster, holders, operating, quick
from support.wait import await_until

CHART = Path(__file__).parents[2] / "charts" / "mailboat"
ACCOUNT = "mailboat-operator"


@pytest.mark.parametrize("everywhere", [True, False], ids=["in all namespaces", "in one namespace"])
async def test_nothing_that_the_operator_does_is_forbidden(api, namespace, unique_name, tmp_path, everywhere):
    home = unique_name("home")
    watched = [] if everywhere else ["--set", f"watch.namespaces={{{namespace}}}"]
    await asyncio.to_thread(api.kubectl, "create", "namespace", home)
    parts = ("--show-only", "templates/rbac.yaml", "--show-only", "templates/serviceaccount.yaml")
    where = ("--namespace", home, *parts, *watched)
    rights = await asyncio.to_thread(api.helm, "template", "mailboat", str(CHART), "--kube-version=1.34.0", *where)
    await asyncio.to_thread(api.kubectl, "apply", "--filename", "-", input=rights)
    may = ("auth", "can-i", "list", "pods", f"--as=system:serviceaccount:{home}:{ACCOUNT}", f"--namespace={namespace}")
    await await_until(lambda: api.try_kubectl(*may).out == "yes\n", what="the rights to be known to the server")
    own = await asyncio.to_thread(api.kubeconfig_for_service_account, home, ACCOUNT)
    kube = await Kube.connect(api.kubeconfig)
    cluster = Cluster(api, kube, namespace, tmp_path)
    mark = api.bookmark()
    try:
        await cluster.create_relay()
        await cluster.create_subscription()
        async with operating(cluster, quick(None if everywhere else namespace), kubeconfig=own):
            await cluster.run_pod("orders-relay-a")
            await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True")
            found = await cluster.get(SUBSCRIPTION, "orders-to-kafka")
            assert set(holders(found).values()) == {"orders-relay-a"}
            await cluster.patch(DEPLOYMENT, "orders-relay", {"spec": {"replicas": 9}})
            await cluster.until(DEPLOYMENT, "orders-relay", lambda it: it["spec"]["replicas"] == 2, "it to be put back")
            await cluster.patch(RELAY, "orders", {"spec": {"runtime": "Sidecar", "replicas": None}})
            await cluster.run_pod("shop-1", sidecar=True)

            async def deleted():
                return await cluster.find(SERVICE_ACCOUNT, "orders-relay") is None

            await await_until(deleted, what="the Deployment's company to go")
    finally:
        await cluster.close()
        await kube.close()
    made = api.requests(user=f"system:serviceaccount:{home}:{ACCOUNT}", after=mark)
    assert {"list", "watch", "get", "patch", "create", "delete"} <= {each.verb for each in made}
    assert [each for each in made if each.code == 403] == []


async def test_a_namespace_that_can_not_be_read_keeps_no_other_waiting(cluster, unique_name, tmp_path, caplog):
    user, lost = unique_name("reader"), unique_name("lost")
    await asyncio.to_thread(
        cluster.api.kubectl,
        *("create", "rolebinding", "operator", "--namespace", cluster.namespace),
        *("--clusterrole=cluster-admin", f"--user={user}"),
    )
    await cluster.create_relay()
    settings = replace(quick(None), namespaces=(lost, cluster.namespace), compare_interval=0.5)
    async with operating(cluster, settings, user=user, groups=()):
        relay = await cluster.run_pod("orders-relay-a")
        await await_until(lambda: relay.version, what="a configuration where the rights are")
        await cluster.create_subscription()
        await await_until(lambda: len(relay.documents) == 2, what="what happens there to be heard")

        def reported():
            return any(
                record.levelname == "WARNING" and getattr(record, "namespace", "") == lost and "403" in record.error
                for record in caplog.records
            )

        await await_until(reported, what="which namespace can't be read to be told")

        await asyncio.to_thread(cluster.api.kubectl, "create", "namespace", lost)
        await asyncio.to_thread(
            cluster.api.kubectl,
            *("create", "rolebinding", "operator", "--namespace", lost),
            *("--clusterrole=cluster-admin", f"--user={user}"),
        )
        late = Cluster(cluster.api, cluster.kube, lost, tmp_path)
        await late.create_relay()
        await late.until(CONFIG_MAP, "orders-relay", lambda _: True, "the other one to be taken up")
