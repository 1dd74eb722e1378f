"""The tables that ``kubectl get`` prints, compared as text. The table is a user's first view of a subscription."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest

from mailboat_devservers.kubernetes import ApiServer
from mailboat_spec.resources.status import EventSubscriptionStatus, OutboxRelayStatus, ResourceStatus

MANIFESTS = """
apiVersion: mailboat.dev/v1alpha1
kind: OutboxRelay
metadata: {name: orders}
spec: {database: {urlSecretRef: {name: orders-db, key: url}}, replicas: 2}
---
apiVersion: mailboat.dev/v1alpha1
kind: OutboxRelay
metadata: {name: payments}
spec: {database: {urlSecretRef: {name: payments-db, key: url}}, runtime: Sidecar, outbox: {table: public.outbox}}
---
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: orders-to-kafka}
spec: {relayRef: {name: orders}, sink: {kafka: {bootstrapServers: ["kafka:9092"], topic: orders}}}
---
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: orders-to-shop}
spec: {relayRef: {name: orders}, partitions: 32, sink: {custom: {type: nats}}}
---
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: payments-to-pubsub}
spec: {relayRef: {name: payments}, sink: {pubsub: {project: acme, topic: payments}}}
---
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: billing}
spec: {source: {kafka: {bootstrapServers: ["kafka:9092"], topic: orders}}, sink: {pull: {}}}
"""


def status(model: type[ResourceStatus], ready: str, reason: str, **fields: Any) -> ResourceStatus:
    found = [("SinkReachable", "True", "Reachable"), ("Ready", ready, reason)]
    conditions = [{"type": kind, "status": value, "reason": why} for kind, value, why in found]
    return model.model_validate({"conditions": conditions, **fields})


OF_RELAY, OF_SUBSCRIPTION = partial(status, OutboxRelayStatus), partial(status, EventSubscriptionStatus)
STATUSES = {
    "obr/orders": OF_RELAY(
        "False", "NotEnoughRelays", replicas=2, readyReplicas=1, replicasDisplay="1/2", subscriptions=2
    ),
    "evs/orders-to-kafka": OF_SUBSCRIPTION(
        "True", "Delivering", source="outbox/orders", sink="kafka", partitionCount=8, lag=12, lagDisplay="12",
        rate=830.5,
    ),
    "evs/orders-to-shop": OF_SUBSCRIPTION(
        "False", "SinkUnavailable", source="outbox/orders", sink="custom", partitionCount=32, lag=100_000,
        lagDisplay="100000+", oldestAge="1h30m", parked=7, dead=3, lastError="503 Service Unavailable",
    ),
    "evs/billing": OF_SUBSCRIPTION(
        "True", "Consuming", source="kafka/orders", sink="pull", partitionCount=12, lag=214, lagDisplay="214",
        oldestAge="2h", dead=3,
    ),
}  # fmt: skip

SUBSCRIPTIONS = """\
NAME                 READY   SOURCE          SINK     PARTITIONS   LAG       OLDEST   DEAD   STATUS            AGE
billing              True    kafka/orders    pull     12           214       2h       3      Consuming         *
orders-to-kafka      True    outbox/orders   kafka    8            12                 0      Delivering        *
orders-to-shop       False   outbox/orders   custom   32           100000+   1h30m    3      SinkUnavailable   *
payments-to-pubsub                                                                                             *
"""

WIDE = """\
NAME                 READY   SOURCE          SINK     PARTITIONS   LAG       OLDEST   DEAD   STATUS            AGE   \
PARKED   RATE    ERROR AGE   LAST ERROR
billing              True    kafka/orders    pull     12           214       2h       3      Consuming         *     \
0        0
orders-to-kafka      True    outbox/orders   kafka    8            12                 0      Delivering        *     \
0        830.5
orders-to-shop       False   outbox/orders   custom   32           100000+   1h30m    3      SinkUnavailable   *     \
7        0                   503 Service Unavailable
payments-to-pubsub                                                                                             *
"""

RELAYS = """\
NAME       READY   RUNTIME      REPLICAS   SUBSCRIPTIONS   STATUS            AGE
orders     False   Deployment   1/2        2               NotEnoughRelays   *
payments           Sidecar                                                   *
"""


@pytest.fixture
def shop(api: ApiServer, namespace: str) -> str:
    api.kubectl("apply", "--namespace", namespace, "--filename", "-", input=MANIFESTS)
    for name, status in STATUSES.items():
        patch = json.dumps({"status": status.manifest()})
        api.kubectl("patch", name, "--namespace", namespace, "--subresource=status", "--type=merge", "--patch", patch)
    return namespace


def printed(api: ApiServer, *arguments: str) -> str:
    """Return the table with a star for every age, and without blanks at the ends of lines."""
    table = re.sub(r"(?<=\s)(\d+m)?\d+s\b {0,2}", lambda age: "*".ljust(len(age[0])), api.kubectl("get", *arguments))
    return "".join(f"{line.rstrip()}\n" for line in table.splitlines())


def test_subscriptions(api: ApiServer, shop: str) -> None:
    assert printed(api, "eventsubscriptions", "--namespace", shop) == SUBSCRIPTIONS


def test_subscriptions_wide(api: ApiServer, shop: str) -> None:
    assert printed(api, "evs", "--namespace", shop, "--output", "wide") == WIDE


def test_relays(api: ApiServer, shop: str) -> None:
    assert printed(api, "obr", "--namespace", shop) == RELAYS


def test_both_kinds_are_listed_by_their_category(api: ApiServer, shop: str) -> None:
    listed = api.kubectl("get", "mailboat", "--namespace", shop, "--output", "name").split()
    assert listed == [
        "eventsubscription.mailboat.dev/billing",
        "eventsubscription.mailboat.dev/orders-to-kafka",
        "eventsubscription.mailboat.dev/orders-to-shop",
        "eventsubscription.mailboat.dev/payments-to-pubsub",
        "outboxrelay.mailboat.dev/orders",
        "outboxrelay.mailboat.dev/payments",
    ]


def test_a_relay_can_be_scaled(api: ApiServer, shop: str) -> None:
    api.kubectl("scale", "obr/orders", "--namespace", shop, "--replicas", "5")
    found = api.kubectl("get", "obr/orders", "--namespace", shop, "--output", "jsonpath={.spec.replicas}")
    assert found == "5"


def test_a_sidecar_can_not_be_scaled(api: ApiServer, shop: str) -> None:
    answer = api.try_kubectl("scale", "obr/payments", "--namespace", shop, "--replicas", "2")
    assert answer.status != 0
    assert "a Sidecar has no replicas of its own, it runs in the application's pods" in answer.err


def test_a_status_in_a_manifest_is_passed_over(api: ApiServer, shop: str) -> None:
    """The status is a subresource, so the right to write the spec does not include the status."""
    patch = '{"status": {"lagDisplay": "0"}}'
    api.kubectl("patch", "evs/orders-to-shop", "--namespace", shop, "--type=merge", "--patch", patch)
    found = api.kubectl("get", "evs/orders-to-shop", "--namespace", shop, "--output", "jsonpath={.status.lagDisplay}")
    assert found == "100000+"
