"""Many resources: a starting operator reconciles them within seconds, with the minimum of requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from api.conftest import with_our_kinds
from mailboat_devservers.kubernetes import ApiServer, start_api_server
from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    RELAY,
    SERVICE,
    SERVICE_ACCOUNT,
    SUBSCRIPTION,
    Kube,
)
from support.operator_under_test import USER, Cluster, condition_of, holders, operating, quick
from support.stub_relays import Outbox, RelayStandIn
from support.wait import await_until

RELAYS, PODS_EACH, SUBSCRIPTIONS, PARTITIONS, NAMESPACE = 20, 2, 200, 4, "shop"
CHILDREN = (CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, SERVICE, SERVICE_ACCOUNT)
SETTINGS = quick(None, status_interval=1.0)

Requests = Counter[tuple[str, str]]
"""Number of requests by verb and resource."""


@pytest.mark.verify
@pytest.mark.timeout(600)
async def test_200_subscriptions_over_20_relays_take_seconds_and_a_counted_number_of_requests(tmp_path, or_skip):
    server = await asyncio.to_thread(or_skip, lambda: start_api_server(tmp_path, audit=True))
    with server as api:
        await asyncio.to_thread(with_our_kinds, api)
        await asyncio.to_thread(api.kubectl, "create", "namespace", NAMESPACE)
        kube = await Kube.connect(api.kubeconfig)
        cluster = Cluster(api, kube, NAMESPACE, tmp_path)
        try:
            pods = await populate(cluster)
            await assert_all_is_put_in_order(cluster, pods)
            await assert_nothing_is_done_twice(cluster, pods)
        finally:
            await cluster.close()
            await kube.close()


async def populate(cluster: Cluster) -> list[RelayStandIn]:
    await asyncio.gather(*(cluster.create_relay(f"r{number}") for number in range(RELAYS)))
    for first in range(0, SUBSCRIPTIONS, 20):
        some = range(first, first + 20)
        await asyncio.gather(*(cluster.create_subscription(f"s{each}", of=f"r{each % RELAYS}") for each in some))
    pods = []
    for number in range(RELAYS):
        outbox = Outbox()
        pods += [await cluster.run_pod(f"r{number}-{pod}", of=f"r{number}", outbox=outbox) for pod in range(PODS_EACH)]
    return pods


async def assert_all_is_put_in_order(cluster: Cluster, pods: Sequence[RelayStandIn]) -> None:
    mark, began = cluster.api.bookmark(), time.monotonic()
    async with operating(cluster, SETTINGS):
        await await_until(lambda: all_ready(cluster.kube), timeout=120, what="all to be Ready")
        took = time.monotonic() - began
        expected = SUBSCRIPTIONS + RELAYS  # events follow the status that they report
        await await_until(
            lambda: requests(cluster.api, mark)["create", "events"] >= expected, what="all of it to be told"
        )
        lived = time.monotonic() - began
    sent = requests(cluster.api, mark)
    assert took < 90, f"it took {took:.0f} s"  # a few seconds on an idle machine

    # One list per kind. kopf lists the two Mailboat kinds a second time. For each second in which kopf still emits
    # listed objects, the controller lists once more and compares. The number is independent of the cluster's size.
    lists = {each: count for each, count in sent.items() if each[0] == "list"}
    assert sum(lists.values()) <= 6 + 2 * 2 + 2 * max(4, lived), lists
    assert count(sent, "get") <= RELAYS * (len(CHILDREN) + 1) + 30, "name checks and discovery"
    applied = {each: number for each, number in sent.items() if each[0] == "patch" and "/" not in each[1]}
    assert sum(applied.values()) == RELAYS * len(CHILDREN), applied
    # Up to three statuses: waiting for relays, waiting for owners, delivering. Only the last one has an event.
    assert RELAYS <= sent["patch", "outboxrelays/status"] <= 3 * RELAYS
    # A few more: a status is written again if its response was lost or another write came first.
    assert SUBSCRIPTIONS <= sent["patch", "eventsubscriptions/status"] <= 3 * SUBSCRIPTIONS + 10
    assert SUBSCRIPTIONS + RELAYS <= sent["create", "events"] <= SUBSCRIPTIONS + 2 * RELAYS
    assert count(sent, "create") == sent["create", "events"]

    assert {pod.configs for pod in pods} == {1}
    assert {pod.outbox.assignments for pod in pods} == {1}, "one push tells all of an outbox's partitions"
    assert max(pod.polls for pod in pods) <= lived / SETTINGS.status_interval + 4


async def assert_nothing_is_done_twice(cluster: Cluster, pods: Sequence[RelayStandIn]) -> None:
    """A new operator applies every child once, which changes none of them, and writes nothing else."""
    before = await versions(cluster.kube)
    mark, polls = cluster.api.bookmark(), sum(pod.polls for pod in pods)
    async with operating(cluster, SETTINGS) as registry:
        await await_until(lambda: polled(registry) >= RELAYS, timeout=60, what="a look at everything")
    sent = requests(cluster.api, mark)
    written = {each: number for each, number in sent.items() if each[0] in ("patch", "create", "update")}
    assert written.keys() <= {("patch", kind.plural) for kind in CHILDREN}, written
    assert max(written.values()) <= RELAYS, written
    assert await versions(cluster.kube) == before
    assert count(sent, "get") <= 30
    assert {(pod.configs, pod.outbox.assignments) for pod in pods} == {(1, 1)}
    assert sum(pod.polls for pod in pods) >= polls + len(pods)


async def versions(kube: Kube) -> dict[str, str]:
    """Return the resource version of each child by its uid."""
    children = [each for kind in CHILDREN for each in (await kube.list(kind)).items]
    return {each["metadata"]["uid"]: each["metadata"]["resourceVersion"] for each in children}


def requests(api: ApiServer, mark: int) -> Requests:
    return Counter((each.verb, each.resource) for each in api.requests(user=USER, after=mark))


def count(requests: Requests, verb: str) -> int:
    return sum(number for (given, _), number in requests.items() if given == verb)


def polled(registry):
    return registry.get_sample_value("mailboat_operator_reconciles_total", {"result": "done"}) or 0


async def all_ready(kube: Kube) -> bool:
    """Return whether all subscriptions deliver, and partitions are spread evenly over the pods of their relay."""
    relays, subscriptions = await kube.list(RELAY), await kube.list(SUBSCRIPTION)
    found = [*relays.items, *subscriptions.items]
    shares = [Counter(holders(each).values()) for each in subscriptions.items]
    even = Counter({PARTITIONS // PODS_EACH: PODS_EACH})
    return all(condition_of(each, "Ready").get("status") == "True" for each in found) and all(
        Counter(share.values()) == even for share in shares
    )
