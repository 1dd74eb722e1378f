"""The resource cache: the newest version wins, from any source, and only relevant changes are reported."""

from __future__ import annotations

import pytest

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, POD, RELAY, SUBSCRIPTION, Listed

KEY = ("shop", "orders")


@pytest.fixture
def changed():
    return []


@pytest.fixture
def cache(changed):
    return ResourceCache(changed.append)


def resource(name, version, uid=None, labels=None, **content):
    uid = uid or f"uid-{name}"
    metadata = {"namespace": "shop", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels or {}}
    return {"metadata": metadata, **content}


def subscription(name, version, relay="orders", uid=None, **content):
    return resource(name, version, uid, spec={"relayRef": {"name": relay}}, **content)


def test_an_older_version_changes_nothing(cache, changed):
    cache.store(RELAY, resource("orders", 5, spec={"n": 5}))
    cache.store(RELAY, resource("orders", 4, spec={"n": 4}))
    assert cache.relay(KEY)["spec"] == {"n": 5}
    assert changed == [KEY]


def test_a_status_written_by_the_operator_queues_nothing(cache, changed):
    cache.store(RELAY, resource("orders", 1, spec={"n": 1}))
    cache.store(RELAY, resource("orders", 2, spec={"n": 1}, status={"replicas": 2}))
    assert cache.relay(KEY)["status"] == {"replicas": 2}
    assert changed == [KEY]


def test_a_changed_relay_reference_queues_the_new_and_the_former_relay(cache, changed):
    cache.store(SUBSCRIPTION, subscription("s", 1, "orders"))
    cache.store(SUBSCRIPTION, subscription("s", 2, "other"))
    assert sorted(changed[1:]) == [("shop", "orders"), ("shop", "other")]
    assert cache.subscriptions_of(("shop", "orders")) == []
    assert len(cache.subscriptions_of(("shop", "other"))) == 1
    assert cache.all_keys() == [("shop", "other")]


def test_a_deletion_of_the_predecessor_does_not_take_the_successor(cache):
    cache.store(SUBSCRIPTION, subscription("s", 9, uid="new"))
    cache.remove(SUBSCRIPTION, subscription("s", 10, uid="old"))
    assert len(cache.subscriptions_of(KEY)) == 1
    cache.remove(SUBSCRIPTION, subscription("s", 11, uid="new"))
    assert cache.subscriptions_of(KEY) == []


def test_a_late_event_of_a_predecessor_does_not_replace_the_successor(cache, changed):
    cache.store(SUBSCRIPTION, subscription("s", 9, uid="new"))
    changed.clear()
    cache.store(SUBSCRIPTION, subscription("s", 7, uid="old"))
    cache.remove(SUBSCRIPTION, subscription("s", 8, uid="old"))
    assert [each["metadata"]["uid"] for each in cache.subscriptions_of(KEY)] == ["new"]
    assert (changed, cache.take_deleted(KEY)) == ([], [])


@pytest.mark.parametrize("loss", ["a watch", "a list", "an answer"])
def test_a_late_response_restores_no_removed_object(cache, changed, loss):
    cache.store(SUBSCRIPTION, subscription("s", 3))
    if loss == "a watch":
        cache.remove(SUBSCRIPTION, subscription("s", 8))
    elif loss == "a list":
        cache.apply_list(SUBSCRIPTION, Listed((), "8"), None)
    else:
        cache.remove_not_found(SUBSCRIPTION, subscription("s", 3))
    changed.clear()
    cache.store(SUBSCRIPTION, subscription("s", 7, status={"lag": 1}))
    cache.apply_list(SUBSCRIPTION, Listed((subscription("s", 5),), "6"), None)
    assert (cache.subscriptions_of(KEY), changed) == ([], [])
    cache.store(SUBSCRIPTION, subscription("s", 9, uid="successor"))
    assert len(cache.subscriptions_of(KEY)) == 1


def test_an_object_deleted_before_its_first_event_is_not_added(cache):
    cache.remove(SUBSCRIPTION, subscription("s", 8))
    cache.store(SUBSCRIPTION, subscription("s", 7))
    assert cache.subscriptions_of(KEY) == []


def test_an_object_that_left_the_selection_returns_with_its_label(cache):
    labels = {"mailboat.dev/relay": "orders"}
    cache.store(CONFIG_MAP, resource("orders-relay", 3, labels=labels))
    cache.remove(CONFIG_MAP, resource("orders-relay", 8, labels=labels))
    cache.store(CONFIG_MAP, resource("orders-relay", 9, labels=labels))
    assert cache.child(CONFIG_MAP, KEY) is not None
    cache.remove(CONFIG_MAP, resource("orders-relay", 8, labels=labels))
    assert cache.child(CONFIG_MAP, KEY) is not None, "a late word about its absence"


def test_lost_objects_are_forgotten_after_a_while():
    now = [0.0]
    cache = ResourceCache(clock=lambda: now[0])
    for number in range(5):
        now[0] += 200
        cache.remove(POD, resource(f"p{number}", 1, uid=f"u{number}"))
    assert len(cache._removed) == 3


def test_an_object_missing_in_a_list_is_removed_unless_it_is_newer_than_the_list(cache, changed):
    for name, version in (("old", 3), ("kept", 4), ("young", 9)):
        cache.store(SUBSCRIPTION, subscription(name, version))
    changed.clear()
    cache.apply_list(SUBSCRIPTION, Listed((subscription("kept", 4), subscription("new", 6)), "7"), None)
    assert [each["metadata"]["name"] for each in cache.subscriptions_of(KEY)] == ["kept", "new", "young"]
    assert changed == [KEY, KEY]


def test_a_list_of_one_namespace_removes_nothing_of_another(cache):
    cache.store(RELAY, resource("orders", 1))
    cache.apply_list(RELAY, Listed((), "9"), "elsewhere")
    assert cache.relay(KEY) is not None
    cache.apply_list(RELAY, Listed((), "9"), "shop")
    assert cache.relay(KEY) is None


def test_a_pod_matters_when_its_relay_does(cache, changed):
    labels = {"mailboat.dev/relay": "orders"}
    cache.store(POD, resource("p", 1, labels=labels, status={"phase": "Pending"}))
    cache.store(POD, resource("p", 2, labels=labels, status={"phase": "Running", "podIP": "10.0.0.1"}))
    cache.store(POD, resource("p", 3, labels=labels, status={"phase": "Running", "podIP": "10.0.0.1", "qosClass": "x"}))
    assert changed == [KEY, KEY]
    assert [pod.address for pod in cache.pods_of(KEY)] == ["10.0.0.1:9808"]


def test_a_child_is_found_by_its_relay(cache):
    cache.store(CONFIG_MAP, resource("orders-relay", 1, labels={"mailboat.dev/relay": "orders"}))
    assert cache.child(CONFIG_MAP, KEY) is not None
    assert cache.child(CONFIG_MAP, ("shop", "other")) is None


def test_failed_pod_creation_is_an_event_and_other_conditions_of_a_deployment_are_not(cache, changed):
    labels = {"mailboat.dev/relay": "orders"}
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    cache.store(DEPLOYMENT, resource("orders-relay", 1, labels=labels, status={}))
    cache.store(DEPLOYMENT, resource("orders-relay", 2, labels=labels, status={"replicas": 1}))
    assert changed == [KEY]
    cache.store(DEPLOYMENT, resource("orders-relay", 3, labels=labels, status={"conditions": [failure]}))
    assert changed == [KEY, KEY]


def test_the_failure_and_the_recovery_of_a_rollout_are_events(cache, changed):
    labels = {"mailboat.dev/relay": "orders"}
    going = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated", "message": "is progressing"}
    halted = {**going, "status": "False", "reason": "ProgressDeadlineExceeded", "message": "has timed out"}
    for version, condition in enumerate((going, {**going, "message": "goes on"}, halted, halted, going), start=1):
        cache.store(DEPLOYMENT, resource("orders-relay", version, labels=labels, status={"conditions": [condition]}))
    assert changed == [KEY, KEY, KEY]
