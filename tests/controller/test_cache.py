"""The resource cache: the newest version wins, from any source, and only relevant changes are reported."""

from __future__ import annotations

import pytest

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, POD, RELAY, SUBSCRIPTION, Listed

KEY = ("shop", "orders")


@pytest.fixture
def told():
    return []


@pytest.fixture
def cache(told):
    return ResourceCache(told.append)


def thing(name, version, uid=None, labels=None, **content):
    uid = uid or f"uid-{name}"
    metadata = {"namespace": "shop", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels or {}}
    return {"metadata": metadata, **content}


def subscription(name, version, relay="orders", uid=None, **content):
    return thing(name, version, uid, spec={"relayRef": {"name": relay}}, **content)


def test_an_older_version_changes_nothing(cache, told):
    cache.saw(RELAY, thing("orders", 5, spec={"n": 5}))
    cache.saw(RELAY, thing("orders", 4, spec={"n": 4}))
    assert cache.relay(KEY)["spec"] == {"n": 5}
    assert told == [KEY]


def test_a_status_of_our_own_is_no_news(cache, told):
    cache.saw(RELAY, thing("orders", 1, spec={"n": 1}))
    cache.saw(RELAY, thing("orders", 2, spec={"n": 1}, status={"replicas": 2}))
    assert cache.relay(KEY)["status"] == {"replicas": 2}
    assert told == [KEY]


def test_a_changed_relay_reference_queues_the_new_and_the_former_relay(cache, told):
    cache.saw(SUBSCRIPTION, subscription("s", 1, "orders"))
    cache.saw(SUBSCRIPTION, subscription("s", 2, "other"))
    assert sorted(told[1:]) == [("shop", "orders"), ("shop", "other")]
    assert cache.subscriptions_of(("shop", "orders")) == []
    assert len(cache.subscriptions_of(("shop", "other"))) == 1
    assert cache.relays() == [("shop", "other")]


def test_a_deletion_of_the_predecessor_does_not_take_the_successor(cache):
    cache.saw(SUBSCRIPTION, subscription("s", 9, uid="new"))
    cache.lost(SUBSCRIPTION, subscription("s", 10, uid="old"))
    assert len(cache.subscriptions_of(KEY)) == 1
    cache.lost(SUBSCRIPTION, subscription("s", 11, uid="new"))
    assert cache.subscriptions_of(KEY) == []


def test_late_word_of_a_predecessor_does_not_replace_the_successor(cache, told):
    cache.saw(SUBSCRIPTION, subscription("s", 9, uid="new"))
    told.clear()
    cache.saw(SUBSCRIPTION, subscription("s", 7, uid="old"))
    cache.lost(SUBSCRIPTION, subscription("s", 8, uid="old"))
    assert [each["metadata"]["uid"] for each in cache.subscriptions_of(KEY)] == ["new"]
    assert (told, cache.departed(KEY)) == ([], [])


@pytest.mark.parametrize("loss", ["a watch", "a list", "an answer"])
def test_an_answer_that_was_on_its_way_brings_nothing_back(cache, told, loss):
    cache.saw(SUBSCRIPTION, subscription("s", 3))
    if loss == "a watch":
        cache.lost(SUBSCRIPTION, subscription("s", 8))
    elif loss == "a list":
        cache.listed(SUBSCRIPTION, Listed((), "8"), None)
    else:
        cache.missing(SUBSCRIPTION, subscription("s", 3))
    told.clear()
    cache.saw(SUBSCRIPTION, subscription("s", 7, status={"lag": 1}))
    cache.listed(SUBSCRIPTION, Listed((subscription("s", 5),), "6"), None)
    assert (cache.subscriptions_of(KEY), told) == ([], [])
    cache.saw(SUBSCRIPTION, subscription("s", 9, uid="successor"))
    assert len(cache.subscriptions_of(KEY)) == 1


def test_an_object_deleted_before_its_first_event_is_not_added(cache):
    cache.lost(SUBSCRIPTION, subscription("s", 8))
    cache.saw(SUBSCRIPTION, subscription("s", 7))
    assert cache.subscriptions_of(KEY) == []


def test_an_object_that_left_the_selection_returns_with_its_label(cache):
    labels = {"mailboat.dev/relay": "orders"}
    cache.saw(CONFIG_MAP, thing("orders-relay", 3, labels=labels))
    cache.lost(CONFIG_MAP, thing("orders-relay", 8, labels=labels))
    cache.saw(CONFIG_MAP, thing("orders-relay", 9, labels=labels))
    assert cache.child(CONFIG_MAP, KEY) is not None
    cache.lost(CONFIG_MAP, thing("orders-relay", 8, labels=labels))
    assert cache.child(CONFIG_MAP, KEY) is not None, "a late word about its absence"


def test_lost_objects_are_forgotten_after_a_while():
    now = [0.0]
    cache = ResourceCache(clock=lambda: now[0])
    for number in range(5):
        now[0] += 200
        cache.lost(POD, thing(f"p{number}", 1, uid=f"u{number}"))
    assert len(cache._lost) == 3


def test_an_object_missing_in_a_list_is_removed_unless_it_is_newer_than_the_list(cache, told):
    for name, version in (("old", 3), ("kept", 4), ("young", 9)):
        cache.saw(SUBSCRIPTION, subscription(name, version))
    told.clear()
    cache.listed(SUBSCRIPTION, Listed((subscription("kept", 4), subscription("new", 6)), "7"), None)
    assert [each["metadata"]["name"] for each in cache.subscriptions_of(KEY)] == ["kept", "new", "young"]
    assert told == [KEY, KEY]


def test_a_list_of_one_namespace_removes_nothing_of_another(cache):
    cache.saw(RELAY, thing("orders", 1))
    cache.listed(RELAY, Listed((), "9"), "elsewhere")
    assert cache.relay(KEY) is not None
    cache.listed(RELAY, Listed((), "9"), "shop")
    assert cache.relay(KEY) is None


def test_a_pod_matters_when_its_relay_does(cache, told):
    labels = {"mailboat.dev/relay": "orders"}
    cache.saw(POD, thing("p", 1, labels=labels, status={"phase": "Pending"}))
    cache.saw(POD, thing("p", 2, labels=labels, status={"phase": "Running", "podIP": "10.0.0.1"}))
    cache.saw(POD, thing("p", 3, labels=labels, status={"phase": "Running", "podIP": "10.0.0.1", "qosClass": "x"}))
    assert told == [KEY, KEY]
    assert [pod.address for pod in cache.pods_of(KEY)] == ["10.0.0.1:9808"]


def test_a_child_is_found_by_its_relay(cache):
    cache.saw(CONFIG_MAP, thing("orders-relay", 1, labels={"mailboat.dev/relay": "orders"}))
    assert cache.child(CONFIG_MAP, KEY) is not None
    assert cache.child(CONFIG_MAP, ("shop", "other")) is None


def test_pods_that_can_not_be_created_are_news_though_other_words_of_a_deployment_are_not(cache, told):
    labels = {"mailboat.dev/relay": "orders"}
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    cache.saw(DEPLOYMENT, thing("orders-relay", 1, labels=labels, status={}))
    cache.saw(DEPLOYMENT, thing("orders-relay", 2, labels=labels, status={"replicas": 1}))
    assert told == [KEY]
    cache.saw(DEPLOYMENT, thing("orders-relay", 3, labels=labels, status={"conditions": [failure]}))
    assert told == [KEY, KEY]


def test_a_rollout_that_kubernetes_gives_up_is_news_and_so_is_its_end(cache, told):
    labels = {"mailboat.dev/relay": "orders"}
    going = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated", "message": "is progressing"}
    halted = {**going, "status": "False", "reason": "ProgressDeadlineExceeded", "message": "has timed out"}
    for version, condition in enumerate((going, {**going, "message": "goes on"}, halted, halted, going), start=1):
        cache.saw(DEPLOYMENT, thing("orders-relay", version, labels=labels, status={"conditions": [condition]}))
    assert told == [KEY, KEY, KEY]
