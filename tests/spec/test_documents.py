"""Sets of documents: all problems in one error, unique names, resolved references, and kubectl's output as input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from mailboat_spec import Manifests, SpecError, read_documents
from support.manifests import event_subscription, outbox_relay

RELAY = outbox_relay(namespace=None, database={"url": "postgresql://h/db"})
SUBSCRIPTION = event_subscription("out", namespace=None)

FROM_KUBECTL = """
apiVersion: v1
kind: List
metadata: {resourceVersion: ""}
items:
- apiVersion: mailboat.dev/v1alpha1
  kind: OutboxRelay
  metadata:
    annotations: {kubectl.kubernetes.io/last-applied-configuration: "{}"}
    creationTimestamp: "2026-01-31T12:00:00Z"
    finalizers: [example.com/keep]
    generation: 3
    labels: {team: shop}
    managedFields: [{manager: kubectl, operation: Apply}]
    name: orders
    namespace: shop
    ownerReferences: []
    resourceVersion: "4711"
    uid: 6f1c8a4e-0000-4000-8000-000000000000
  spec: {database: {urlSecretRef: {name: orders-db, key: url}}}
  status: {observedGeneration: 3, replicas: 2, fromTheFuture: {a: 1}}
- apiVersion: mailboat.dev/v1alpha1
  kind: EventSubscription
  metadata: {name: out, namespace: shop}
  spec: {relayRef: {name: orders}, sink: {log: {}}}
  status:
    lag: 12
    oldestAge: 1m30s
    conditions:
    - {type: Ready, status: "True", reason: Delivering, message: "", lastTransitionTime: 2026-01-31T12:00:00Z}
    - {type: NotKnownYet, status: Unknown}
    partitions: [{partition: 0, pod: orders-0, lag: 12}]
"""


def edited(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(body), **fields}


def problems(*bodies: object) -> list[str]:
    with pytest.raises(SpecError) as refused:
        read_documents((f"orders.yaml, document {number}", body) for number, body in enumerate(bodies, start=1))
    return [str(problem) for problem in refused.value.problems]


def test_the_order_of_documents_does_not_matter() -> None:
    assert read_documents([("a", SUBSCRIPTION), ("b", RELAY)]) == read_documents([("a", RELAY), ("b", SUBSCRIPTION)])


def test_no_documents_and_empty_ones_make_an_empty_set() -> None:
    assert read_documents([]) == read_documents([("a", None)]) == Manifests(relays=(), subscriptions=())


def test_the_output_of_kubectl_is_a_config_file() -> None:
    manifests = read_documents([("out.yaml", yaml.safe_load(FROM_KUBECTL))])
    (relay,), (subscription,) = manifests.relays, manifests.subscriptions
    assert relay.metadata.uid.startswith("6f1c8a4e")
    assert relay.metadata.generation == 3
    assert relay.metadata.labels == {"team": "shop"}
    assert relay.status is not None
    assert relay.status.replicas == 2
    assert subscription.status is not None
    assert subscription.status.oldest_age is not None
    assert (subscription.status.lag, subscription.status.oldest_age.seconds) == (12, 90.0)
    reasons = {each.type: each.reason for each in subscription.status.conditions}
    assert reasons["Ready"] == "Delivering"
    assert "Stalled" not in reasons
    assert subscription.status.partitions[0].pod == "orders-0"


@pytest.mark.parametrize("status", [{"lag": "many"}, "broken", {"conditions": [{"type": 5}]}, []])
def test_a_status_that_cannot_be_read_is_passed_over(status: object) -> None:
    manifests = read_documents([("a", RELAY), ("b", edited(SUBSCRIPTION, status=status))])
    assert manifests.subscriptions[0].status is None


def test_all_problems_of_all_documents_are_reported_at_once_in_order() -> None:
    relay = edited(RELAY, spec={"database": {"url": "postgresql://h/db"}, "runtime": "Pod", "wake": {"notfy": "Auto"}})
    orphan = edited(SUBSCRIPTION, spec={"relayRef": {"name": "nowhere"}, "sink": {"log": {}}})
    third = edited(SUBSCRIPTION, metadata={"name": "third"}, spec={"relayRef": {"name": "orders"}, "partitions": 0})
    assert problems(orphan, relay, third) == [
        'orders.yaml, document 1: spec.relayRef.name: no OutboxRelay is called "nowhere" in namespace default: '
        "add its manifest, or name one that is there (orders)",
        'orders.yaml, document 2: spec.runtime: must be one of Deployment, Sidecar, not "Pod"',
        "orders.yaml, document 2: spec.wake.notfy: unknown field, did you mean notify?",
        "orders.yaml, document 3: spec.partitions: must be at least 1, not 0",
        "orders.yaml, document 3: spec.sink: is required: Where events go: exactly one kind of destination.",
    ]


def test_the_error_reads_as_a_list_or_as_one_sentence() -> None:
    with pytest.raises(SpecError) as several:
        read_documents([("a.yaml", []), ("b.yaml", 5)])
    assert str(several.value).startswith("2 problems:\n  a.yaml: is not a resource")
    with pytest.raises(SpecError) as single:
        read_documents([("a.yaml", [])])
    assert str(single.value).startswith("a.yaml: is not a resource: it must be a mapping with apiVersion, kind")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (
            {"kind": "OutboxRely"},
            'kind: must be one of OutboxRelay, EventSubscription, not "OutboxRely"; did you mean Outbox',
        ),
        ({"kind": "outboxrelay"}, "did you mean OutboxRelay?"),
        ({"kind": "Subscription"}, "kind: must be one of OutboxRelay, EventSubscription"),
        ({"kind": None}, "kind: is required: OutboxRelay or EventSubscription"),
        ({"kind": 5}, "kind: must be one of OutboxRelay, EventSubscription, not a number"),
        (
            {"kind": "Secret", "apiVersion": "mailboat.dev/v1alpha1"},
            "kind: must be one of OutboxRelay, EventSubscription",
        ),
        ({"kind": "Secret", "apiVersion": None}, "kind: must be one of OutboxRelay, EventSubscription"),
        ({"kind": "OutboxRely", "apiVersion": "mailbot.dev/v1"}, "did you mean OutboxRelay?"),
        ({"kind": "OutboxRelay", "apiVersion": "apps/v1"}, 'must be mailboat.dev/v1alpha1, not "apps/v1"'),
        ({"apiVersion": "mailboat.dev/v1"}, 'apiVersion: must be mailboat.dev/v1alpha1, not "mailboat.dev/v1"'),
        ({"apiVersion": None}, "apiVersion: is required: write apiVersion: mailboat.dev/v1alpha1"),
        ({"apiVersion": 1}, "apiVersion: must be mailboat.dev/v1alpha1, not a number"),
    ],
)
def test_other_kinds_and_versions_are_refused(head: dict[str, Any], expected: str) -> None:
    (problem,) = problems(edited(RELAY, **head))
    assert expected in problem


OTHERS: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "orders-db"}, "stringData": {"url": "x"}},
    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "orders"}, "spec": {"replicas": 2}},
    {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "orders"}},
    {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "orders"}},
]


def test_resources_of_other_groups_beside_ours_are_passed_over() -> None:
    ours = read_documents([("a", RELAY), ("b", SUBSCRIPTION)])
    mixed = [OTHERS[0], RELAY, *OTHERS[1:], {"apiVersion": "v1", "kind": "List", "items": [OTHERS[0], SUBSCRIPTION]}]
    assert read_documents((str(number), body) for number, body in enumerate(mixed)) == ours


def test_a_file_without_a_mailboat_resource_is_reported() -> None:
    assert problems(*OTHERS) == [
        'orders.yaml, document 1: kind: "Secret" is not a resource of Mailboat, only OutboxRelay and EventSubscription '
        "are, and there is none of them here"
    ]


def test_names_are_unique_within_kind_and_namespace() -> None:
    assert problems(RELAY, RELAY) == [
        "orders.yaml, document 2: metadata.name: OutboxRelay default/orders is there already "
        "(orders.yaml, document 1): rename one"
    ]
    elsewhere = edited(RELAY, metadata={"name": "orders", "namespace": "shop"})
    same_name_other_kind = edited(SUBSCRIPTION, metadata={"name": "orders"})
    manifests = read_documents([("a", RELAY), ("b", elsewhere), ("c", same_name_other_kind)])
    assert (len(manifests.relays), len(manifests.subscriptions)) == (2, 1)


def test_a_subscription_needs_its_relay_in_its_own_namespace() -> None:
    (problem,) = problems(edited(RELAY, metadata={"name": "orders", "namespace": "shop"}), SUBSCRIPTION)
    assert "in namespace default, only in shop: both must have the same metadata.namespace" in problem


def test_a_misspelled_relay_is_guessed() -> None:
    (problem,) = problems(RELAY, edited(SUBSCRIPTION, spec={"relayRef": {"name": "order"}, "sink": {"log": {}}}))
    assert problem.endswith('no OutboxRelay is called "order" in namespace default; did you mean orders?')


def test_a_subscription_may_refer_to_a_relay_with_an_invalid_spec() -> None:
    assert problems(edited(RELAY, spec={}), SUBSCRIPTION) == [
        "orders.yaml, document 1: spec.database: is required: The database that holds the outbox: urlSecretRef, or url."
    ]


def test_field_names_that_are_no_strings_are_refused() -> None:
    (problem,) = problems(edited(RELAY, spec={"database": {"url": "postgresql://h/db"}, 1: 2}))
    assert problem == "orders.yaml, document 1: spec[1]: field names must be strings: put this one in quotes"
