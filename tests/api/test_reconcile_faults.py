"""Faults during reconciliation: an operator that is killed at any write, and an API server that is unavailable."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from api.conftest import with_our_kinds
from mailboat_devservers.kubernetes import start_api_server
from mailboat_operator.controller import controller
from mailboat_operator.controller.cache import essence
from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, RELAY, SERVICE, SUBSCRIPTION, Kube
from mailboat_operator.kube.errors import NotFound
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient
from mailboat_operator.resources.pod import RESOURCES_KEY
from support.operator_under_test import CHILDREN, Cluster, condition_of, configuring, holders, operating, quick
from support.wait import await_until


class Life:
    """Life of an operator that ends at its first write, to the API server or to a relay.

    The life ends either before the write is sent, or after the write but before its response is processed.
    """

    def __init__(self, *, after_it):
        self.ended = asyncio.Event()
        self.wrote_to = ""
        self._after_it = after_it

    async def write(self, whom, write):
        if not self.wrote_to:
            self.wrote_to = whom
            try:
                if self._after_it:
                    await write
                    write = None
            finally:
                self.ended.set()
        if write is not None:
            write.close()
        await asyncio.Event().wait()  # the operator makes no further progress


class MortalKube(Kube):
    """Treats an apply that changes nothing as a read: a new operator applies every child that it finds."""

    life: Life

    async def _json(self, method, *arguments, **options):
        harmless = method == "GET" or (options.get("verb") == "apply" and await self._is_stored(*arguments))
        call = super()._json(method, *arguments, **options)
        return await (call if harmless else self.life.write("the API server", call))

    async def _is_stored(self, kind, path, query, body, content_type):
        try:
            live = await super()._json("GET", kind, path)
        except NotFound:
            return False
        after = await super()._json("PATCH", kind, path, {**query, "dryRun": "All"}, body, content_type)
        return essence(after) == essence(live)


class MortalRelayClient(RelayClient):
    life: Life

    async def _put(self, pod, path, body):
        return await self.life.write(path, super()._put(pod, path, body))


async def live_until_a_write(cluster, monkeypatch, *, after_it):
    """Run an operator until its first write, or until three reconciles wrote nothing.

    Return the receiver of the write, or "" if there was none.
    """
    life = Life(after_it=after_it)
    kube = await MortalKube.connect(cluster.api.kubeconfig)
    kube.life = life
    registry = CollectorRegistry()

    def client(*arguments, **options):
        made = MortalRelayClient(*arguments, **options)
        made.life = life
        return made

    monkeypatch.setattr(controller, "RelayClient", client)
    task = asyncio.create_task(
        controller.run_controller(kube, quick(cluster.namespace), cluster.signer, Metrics(registry))
    )

    def polled():
        return (registry.get_sample_value("mailboat_operator_reconciles_total", {"result": "done"}) or 0) >= 3

    try:
        await await_until(lambda: life.ended.is_set() or polled(), timeout=60, what="a death, or a quiet life")
        return life.wrote_to
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kube.close()


@pytest.mark.timeout(600)
async def test_an_operator_that_is_killed_at_every_write_reaches_the_desired_state(cluster, orders, monkeypatch):
    """Each operator is killed after its first write. After every third write, one is killed before its write."""
    relays = [await cluster.run_pod(f"orders-relay-{name}") for name in "ab"]
    written: Counter[str] = Counter()
    while whom := await live_until_a_write(cluster, monkeypatch, after_it=True):
        written[whom] += 1
        if written.total() % 3 == 0:
            await live_until_a_write(cluster, monkeypatch, after_it=False)
        assert written.total() < 60, f"it goes round in circles: {written}"
    assert written["the API server"] >= len(CHILDREN) + 2
    assert written["/config"] >= len(relays)
    assert written["/assignment"] >= 1
    for kind in CHILDREN:
        assert await cluster.find(kind, "orders-relay") is not None
    found = await cluster.get(SUBSCRIPTION, "orders-to-kafka")
    assert condition_of(found, "Ready")["reason"] == "Delivering"
    assert Counter(holders(found).values()) == {"orders-relay-a": 2, "orders-relay-b": 2}
    assert len({relay.version for relay in relays}) == 1


class DeafFeed:
    """A feed whose watches are open and never report an event."""

    def __init__(self, kube, namespaces, kinds, cache, listener):
        self._watches = [(kind, namespace) for kind in kinds for namespace in namespaces]
        self._listener = listener

    async def run(self):
        for kind, namespace in self._watches:
            self._listener.watch_opened(kind, namespace)
        await asyncio.Event().wait()


async def test_changes_that_watches_miss_are_found_by_the_periodic_comparison(cluster, monkeypatch):
    monkeypatch.setattr(controller, "KopfFeed", DeafFeed)
    await cluster.create_relay()
    relay = await cluster.run_pod("orders-relay-a")
    async with operating(cluster, quick(cluster.namespace, compare_interval=1.0)):
        await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the children")
        await await_until(lambda: relay.version, what="the configuration")
        await cluster.delete(SERVICE, "orders-relay")
        await cluster.remove_pod("orders-relay-a")
        await cluster.until(SERVICE, "orders-relay", bool, "the Service, again")
        await cluster.until(RELAY, "orders", lambda it: it["status"].get("replicas") == 0, "the pod to be missed")


SCENES = {
    "no child at all": [],
    "a ConfigMap of an older version": ["config"],
    "everything but the Deployment": ["no deployment"],
    "a subscription that was deleted meanwhile": ["subscription"],
    "a relay that was deleted and made anew": ["relay"],
}


@pytest.mark.parametrize("scene", SCENES)
async def test_the_same_state_is_reached_from_any_other(cluster, scene):
    await cluster.create_relay()
    await cluster.create_subscription("a")
    await cluster.create_subscription("b")
    if SCENES[scene]:
        async with operating(cluster):
            await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the last child")
            await cluster.until_condition(SUBSCRIPTION, "b", "Ready", "False")
    expected = ["orders", "a", "b"]
    match SCENES[scene]:
        case ["config"]:
            old = "apiVersion: mailboat.dev/v1alpha1\nkind: OutboxRelay\nmetadata: {name: orders}\n"
            await cluster.patch(CONFIG_MAP, "orders-relay", {"data": {RESOURCES_KEY: old}})
        case ["no deployment"]:
            await cluster.delete(DEPLOYMENT, "orders-relay")
        case ["subscription"]:
            await cluster.delete(SUBSCRIPTION, "a")
            expected = ["orders", "b"]
        case ["relay"]:
            await cluster.delete(RELAY, "orders")
            for kind in CHILDREN:  # as Kubernetes' garbage collector does
                await cluster.delete(kind, "orders-relay")
            await cluster.create_relay()
    relay = await cluster.get(RELAY, "orders")
    async with operating(cluster):
        for kind in CHILDREN:
            child = await cluster.until(kind, "orders-relay", bool, f"the {kind.name}")
            assert child["metadata"]["ownerReferences"][0]["uid"] == relay["metadata"]["uid"]
        await cluster.until(CONFIG_MAP, "orders-relay", configuring(*expected), "the configuration")


async def until_blocked(registry):
    """Wait until the operator has found the new relay, and children of the old one in its way.

    Events of relays and events of children arrive independently. If the deletion of a child arrives before the deletion
    of its relay, the operator creates the child again, and this server has no garbage collector that removes it.
    """
    await await_until(
        lambda: registry.get_sample_value("mailboat_operator_reconciles_total", {"result": "conflict"}),
        what="the new relay to find the old children in its way",
    )


async def test_children_of_a_deleted_relay_of_the_same_name_are_waited_for(cluster):
    await cluster.create_relay()
    async with operating(cluster) as registry:
        old = await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the children")
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")  # the status is written as well
        await cluster.delete(RELAY, "orders")
        await cluster.create_relay()  # no garbage collector runs here, so the old children are in the way
        await until_blocked(registry)
        for kind in CHILDREN:
            await cluster.delete(kind, "orders-relay")
        uid = old["metadata"]["uid"]
        await cluster.until(DISRUPTION_BUDGET, "orders-relay", lambda it: it["metadata"]["uid"] != uid, "new children")
        found = await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")
        reasons = Counter(reason for _, reason, _ in await cluster.events("orders"))
        assert "NameTaken" not in reasons
        assert condition_of(found, "Stalled") == {}


async def test_a_child_of_a_predecessor_that_stays_is_reported_after_a_while(cluster):
    await cluster.create_relay()
    async with operating(cluster) as registry:
        await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the children")
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")
        held = {"metadata": {"finalizers": ["example.com/theirs"]}}
        await cluster.patch(SERVICE, "orders-relay", held)
        await cluster.delete(RELAY, "orders")
        await cluster.create_relay()
        await until_blocked(registry)
        for kind in CHILDREN:
            await cluster.delete(kind, "orders-relay")
        still = "Service orders-relay of the deleted relay is still there"
        found = await cluster.until(
            RELAY, "orders", lambda it: still in condition_of(it, "Ready").get("message", ""), "the Service to be told"
        )
        assert condition_of(found, "Ready")["reason"] == "Progressing"
        assert "finalizer" in condition_of(found, "Ready")["message"]
        assert condition_of(found, "Reconciling")["status"] == "True"
        await cluster.patch(SERVICE, "orders-relay", {"metadata": {"finalizers": None}})
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")


async def test_a_child_with_a_finalizer_does_not_block_the_configuration_of_relays(cluster):
    await cluster.create_relay()
    await cluster.create_subscription("a")
    async with operating(cluster):
        relay = await cluster.run_pod("orders-relay-a")
        await cluster.until_condition(SUBSCRIPTION, "a", "Ready", "True")
        await cluster.patch(SERVICE, "orders-relay", {"metadata": {"finalizers": ["example.com/theirs"]}})
        await cluster.delete(SERVICE, "orders-relay")
        await cluster.create_subscription("b")
        await cluster.patch(RELAY, "orders", {"spec": {"replicas": 3}})
        both = [f"{cluster.namespace}/{name}" for name in "ab"]
        await await_until(lambda: sorted(relay.names()) == both, what="the new configuration")
        await cluster.until(DEPLOYMENT, "orders-relay", lambda it: it["spec"]["replicas"] == 3, "the later child")
        await cluster.until_condition(SUBSCRIPTION, "b", "Ready", "True")
        going = "Service orders-relay is being deleted"
        await cluster.until(
            RELAY, "orders", lambda it: going in condition_of(it, "Ready").get("message", ""), "the Service to be told"
        )
        await cluster.patch(SERVICE, "orders-relay", {"metadata": {"finalizers": None}})
        await cluster.until(
            SERVICE, "orders-relay", lambda it: "deletionTimestamp" not in it["metadata"], "the Service, anew"
        )


async def test_children_that_were_orphaned_on_purpose_are_taken_over_by_the_next_relay(cluster):
    await cluster.create_relay()
    async with operating(cluster):
        await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the children")
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")
    for kind in CHILDREN:  # as the garbage collector does for --cascade=orphan
        await cluster.patch(kind, "orders-relay", {"metadata": {"ownerReferences": None}})
    await cluster.delete(RELAY, "orders")
    before = {kind: (await cluster.get(kind, "orders-relay"))["metadata"]["uid"] for kind in CHILDREN}
    relay = await cluster.create_relay()
    uid = relay["metadata"]["uid"]
    async with operating(cluster):
        for kind in CHILDREN:

            def adopted(found):
                return [each["uid"] for each in found["metadata"].get("ownerReferences") or ()] == [uid]

            found = await cluster.until(kind, "orders-relay", adopted, f"the {kind.name} to be taken over")
            assert found["metadata"]["uid"] == before[kind], "the very same object"
        await cluster.until_condition(RELAY, "orders", "Ready", "False", "Starting")


async def test_a_controller_that_writes_the_same_fields_all_the_time_does_not_win(api, cluster):
    await cluster.create_relay()
    rival = ("apply", "--server-side", "--force-conflicts", "--field-manager=rival", "--filename=-")
    wanted = """
    apiVersion: apps/v1
    kind: Deployment
    metadata: {{name: orders-relay, namespace: {namespace}, labels: {{mailboat.dev/relay: stolen}}}}
    spec: {{replicas: {replicas}}}
    """
    async with operating(cluster) as registry:
        await cluster.until(DISRUPTION_BUDGET, "orders-relay", bool, "the children")
        # Each apply takes the fields from the operator, at any point of its work.
        for replicas in range(10, 20):
            text = wanted.format(namespace=cluster.namespace, replicas=replicas)
            await asyncio.to_thread(api.kubectl, *rival, input=text)
        deployment = await cluster.until(
            DEPLOYMENT, "orders-relay", lambda it: it["spec"]["replicas"] == 2, "what the spec says"
        )
        assert deployment["metadata"]["labels"]["mailboat.dev/relay"] == "orders"
        applied = sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.labels.get("verb") == "apply"
            and sample.labels.get("resource") == "deployments"
            and sample.name.endswith("_total")
        )
        assert 2 <= applied <= 12, "put back, and not more often than it was taken"


@pytest.mark.timeout(600)
async def test_an_api_server_that_restarts_in_the_middle_costs_nothing(tmp_path, or_skip):
    server = await asyncio.to_thread(or_skip, lambda: start_api_server(tmp_path / "api"))
    with server as api:
        await asyncio.to_thread(with_our_kinds, api)
        await asyncio.to_thread(api.kubectl, "create", "namespace", "shop")
        kube = await Kube.connect(api.kubeconfig)
        cluster = Cluster(api, kube, "shop", tmp_path)
        try:
            await cluster.create_relay()
            for name in ("a", "b", "c"):
                await cluster.create_subscription(name)
            async with operating(cluster):
                relay = await cluster.run_pod("orders-relay-a")
                await cluster.until_condition(SUBSCRIPTION, "c", "Ready", "True")
                pushes = cluster.outbox.assignments
                await asyncio.to_thread(api.kill)
                polls = relay.polls
                cluster.outbox.lag["shop/a"] = {1: 9}
                await await_until(lambda: relay.polls > polls + 3, what="relays to be looked at all the same")
                await asyncio.to_thread(api.restart)
                await cluster.until(SUBSCRIPTION, "a", lambda it: it["status"].get("lag") == 9, "the lag", timeout=60)
                # Watches tend to miss changes right after a restart.
                await cluster.delete(SUBSCRIPTION, "b")
                await cluster.create_subscription("d")
                await cluster.delete(DEPLOYMENT, "orders-relay")
                expected = ["shop/a", "shop/c", "shop/d"]
                await await_until(lambda: sorted(relay.names()) == expected, timeout=60, what="the new configuration")
                await cluster.until_condition(SUBSCRIPTION, "d", "Ready", "True", timeout=60)
                await cluster.until(DEPLOYMENT, "orders-relay", bool, "the Deployment", timeout=60)
                assert cluster.outbox.assignments == pushes + 1, "only what is new was shared out"
        finally:
            await cluster.close()
            await kube.close()
