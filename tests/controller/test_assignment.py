"""Assignment of partitions to pods: complete, balanced, with a minimum of moves, and only to pods that can serve."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_operator.relays.state import (
    Plan,
    Work,
    Worker,
    assign,
    assignment_of,
    needs_push,
    next_generation,
    sticky,
)

PODS = st.sets(st.sampled_from([f"pod-{letter}" for letter in "abcdef"]))
WORK = st.lists(
    st.builds(
        Work, st.sampled_from([f"shop/s{number}" for number in range(5)]), st.integers(1, 12), st.just(frozenset())
    ),
    max_size=5,
    unique_by=lambda work: work.name,
)


EVERYTHING = frozenset([f"shop/s{number}" for number in range(5)] + ["shop/plain", "shop/secret"])


def workers(*pods, serves=EVERYTHING, secrets=()):
    return [Worker(pod, frozenset(serves), frozenset(secrets)) for pod in pods]


def partitions(work):
    return {(each.name, number) for each in work for number in range(each.partitions)}


@given(WORK, PODS, PODS)
def test_every_partition_is_owned_once_and_shares_differ_by_one_at_most(work, before, after):
    first = assign(work, workers(*before), {})
    second = assign(work, workers(*after), first)
    for owners, pods in ((first, before), (second, after)):
        assert set(owners) == (partitions(work) if pods else set())
        shares = Counter(dict.fromkeys(pods, 0))
        shares.update(owners.values())
        assert set(shares) == pods
        assert not shares or max(shares.values()) - min(shares.values()) <= 1


def test_a_partition_goes_only_to_a_pod_that_sees_its_secrets():
    work = [Work("shop/plain", 4, frozenset()), Work("shop/secret", 4, frozenset({"login"}))]
    owners = assign(work, [*workers("old"), *workers("new", secrets=["login", "other"])], {})
    assert {owners["shop/secret", number] for number in range(4)} == {"new"}
    assert Counter(owners["shop/plain", number] for number in range(4)) == {"old": 2, "new": 2}
    assert partitions([work[1]]).isdisjoint(assign(work, workers("old"), {}))


@pytest.mark.parametrize(
    ("serving", "expected"),
    [
        ({"a": ["shop/s1"], "b": ["shop/s1"]}, {"a": 2, "b": 2}),
        ({"a": ["shop/s1"], "b": ["shop/s2"]}, {"a": 4}),
        ({"a": [], "b": ["shop/s1"]}, {"b": 4}),
        ({"a": [], "b": []}, {}),
    ],
    ids=["both have built it", "one knows another only", "one failed to build it", "nobody has it"],
)
def test_a_partition_goes_only_to_a_pod_that_has_built_its_subscription(serving, expected):
    able = [worker for pod, names in serving.items() for worker in workers(pod, serves=names)]
    before = {("shop/s1", number): "a" for number in range(4)}
    owners = assign([Work("shop/s1", 4, frozenset())], able, before)
    assert Counter(owners.values()) == expected


def test_a_plan_sticks_while_partitions_are_on_their_way():
    plan = Plan(7, {("s", 0): "a", ("s", 1): "b"}, at=0.0)
    half_moved = {("s", 0): "a", ("s", 1): "a"}
    assert sticky(plan, half_moved, workers("a", "b")) == plan.owners
    assert sticky(plan, half_moved, workers("a")) == {("s", 0): "a", ("s", 1): "a"}
    assert sticky(None, half_moved, workers("a", "b")) == half_moved


def test_an_assignment_is_pushed_only_to_relays_that_differ():
    desired = {("s", 0): "a"}
    plan = Plan(7, desired, at=100.0)
    assert not needs_push(desired, {("s", 0): "a", ("s", 9): "x"}, None, now=100, timeout=30)
    assert needs_push(desired, {}, None, now=100, timeout=30)
    assert not needs_push(desired, {}, plan, now=120, timeout=30), "they were told, and have time to follow"
    assert needs_push(desired, {}, plan, now=131, timeout=30)
    assert needs_push({("s", 0): "b"}, {}, plan, now=101, timeout=30), "a new plan does not wait"
    assert not needs_push({}, {("s", 0): "a"}, plan, now=200, timeout=30), "nobody to tell"


def test_generations_rise_whatever_the_clock_does():
    assert next_generation(None, 1000) == 1000
    assert next_generation(Plan(5000, {}, 0.0), 1000) == 5001
    assert next_generation(Plan(5000, {}, 0.0), 9000) == 9000


def test_a_relay_reads_the_request_of_the_operator():
    made = assignment_of({("shop/b", 1): "y", ("shop/a", 0): "x", ("shop/b", 0): "x"}, 9, "shop")
    assert made.model_dump(mode="json") == {
        "generation": 9,
        "subscriptions": {"shop/a": {"0": "shop/x"}, "shop/b": {"0": "shop/x", "1": "shop/y"}},
    }
