"""Story 9: the status reports a relay that hangs or is cut off, and a broker that does not exist."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from namespace import StoryNamespace, violations
from support.wait import wait_until

NAME = "orders-to-kafka"
TO_UNKNOWN_BROKER = """
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: to-unknown-broker}
spec:
  relayRef: {name: orders}
  sink: {kafka: {bootstrapServers: ["kafka-typo:9092"], topic: orders}}
"""
Pod = dict[str, Any]


@pytest.fixture(scope="module")
def shop(story: StoryNamespace) -> StoryNamespace:
    """Two relays that share eight partitions."""
    story.apply("relay", "to-kafka")
    story.until_ready(NAME)
    wait_until(lambda: len(holders(story)), 120, "two relays to share the partitions", met=lambda count: count == 2)
    return story


class Observation(NamedTuple):
    """Ready condition and lag of the status, and the number of cursors that the database assigns to a relay."""

    ready: dict[str, Any]
    lag: int
    held: int


def frozen(story: StoryNamespace, pod: Pod) -> AbstractContextManager[None]:
    return story.frozen(pod, "mailboat-relay")


def cut_off(story: StoryNamespace, pod: Pod) -> AbstractContextManager[None]:
    return story.cut_off(pod)


@pytest.mark.parametrize("ends", [frozen, cut_off])
def test_a_silent_relay_is_named_its_lag_is_counted_and_its_partitions_are_taken_over(
    shop: StoryNamespace, ends: Callable[[StoryNamespace, Pod], AbstractContextManager[None]], record_property: Any
) -> None:
    target, *_ = shop.relay_pods("orders")
    name = target["metadata"]["name"]
    seen: list[Observation] = []
    with shop.trading():
        shop.until_written(100)
        with ends(shop, target):
            began = time.monotonic()
            wait_until(
                lambda: observe(shop, name, seen),
                90,
                f"the other relay to take over from {name}",
                met=lambda observation: not observation.held,
            )
            took = time.monotonic() - began
        shop.until_written(100)
        wait_until(lambda: len(holders(shop)), 120, "both relays to have a share", met=lambda count: count == 2)
    record_property("taken over", f"{took:.1f} s")
    silent = [each for each in seen if each.ready.get("reason") == "RelaySilent"]
    assert any(name in each.ready["message"] for each in silent), f"no condition names {name}: {seen}"
    assert any(each.lag > 0 for each in silent), f"the lag of {name} was not counted (G7): {seen}"
    assert took < 20
    shop.until_ready(NAME)
    shop.until_lag(NAME)
    assert violations(shop.audit("orders")) == {}


def test_a_subscription_to_an_unknown_broker_is_never_ready(shop: StoryNamespace) -> None:
    seen: list[tuple[str, str]] = []

    def ready() -> tuple[str, str]:
        condition = shop.condition("to-unknown-broker", "Ready")
        seen.append((condition.get("status", ""), condition.get("reason", "")))
        return seen[-1]

    shop.apply(TO_UNKNOWN_BROKER)
    wait_until(ready, 120, "the condition SinkUnavailable", met=("False", "SinkUnavailable").__eq__)
    assert "True" not in {status for status, _ in seen}, f"Ready before the broker answered: {seen}"
    shop.kubectl("delete", "eventsubscription", "to-unknown-broker")


def holders(story: StoryNamespace) -> set[str]:
    owners = story.in_postgres("select distinct owner from mailboat.cursors where owner is not null", "shop")
    return set(owners.split())


def observe(story: StoryNamespace, pod: str, seen: list[Observation]) -> Observation:
    held = story.in_postgres(f"select count(*) from mailboat.cursors where owner = '{story.namespace}/{pod}'", "shop")
    lag = story.status(NAME).get("lag", 0)
    seen.append(Observation(story.condition(NAME, "Ready"), lag, int(held)))
    return seen[-1]
