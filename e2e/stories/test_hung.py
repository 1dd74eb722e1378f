"""Story 9: a relay that hangs or is cut off, and a destination that was never there: the status tells it at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from namespace import Stage, wrong_in
from support.wait import wait_until

NAME = "orders-to-kafka"
TO_NOBODY = """
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: to-nobody}
spec:
  relayRef: {name: orders}
  sink: {kafka: {bootstrapServers: ["kafka-typo:9092"], topic: orders}}
"""
Pod = dict[str, Any]


@pytest.fixture(scope="module")
def shop(stage: Stage) -> Stage:
    """Two relays that share eight partitions."""
    stage.apply("relay", "to-kafka")
    stage.until_ready(NAME)
    wait_until(lambda: len(holders(stage)), 120, "two relays to share the partitions", met=lambda count: count == 2)
    return stage


class Seen(NamedTuple):
    """What the status says, and how many partitions a relay still holds by the database."""

    ready: dict[str, Any]
    lag: int
    held: int


def frozen(stage: Stage, pod: Pod) -> AbstractContextManager[None]:
    return stage.frozen(pod, "mailboat-relay")


def cut_off(stage: Stage, pod: Pod) -> AbstractContextManager[None]:
    return stage.cut_off(pod)


@pytest.mark.parametrize("ends", [frozen, cut_off])
def test_a_relay_that_hangs_is_named_counted_and_replaced(
    shop: Stage, ends: Callable[[Stage, Pod], AbstractContextManager[None]], record_property: Any
) -> None:
    victim, *_ = shop.relay_pods("orders")
    name = victim["metadata"]["name"]
    seen: list[Seen] = []
    with shop.trading():
        shop.until_written(100)
        with ends(shop, victim):
            began = time.monotonic()
            wait_until(
                lambda: looked(shop, name, seen),
                90,
                f"the other relay to take over from {name}",
                met=lambda it: not it.held,
            )
            took = time.monotonic() - began
        shop.until_written(100)
        wait_until(lambda: len(holders(shop)), 120, "both relays to have a share", met=lambda count: count == 2)
    record_property("taken over", f"{took:.1f} s")
    silent = [each for each in seen if each.ready.get("reason") == "RelaySilent"]
    assert any(name in each.ready["message"] for each in silent), f"nobody named {name}: {seen}"
    assert any(each.lag > 0 for each in silent), f"nobody counted what waits for {name} (G7): {seen}"
    assert took < 20
    shop.until_ready(NAME)
    shop.until_lag(NAME)
    assert wrong_in(shop.audit("orders")) == {}


def test_a_destination_that_was_never_there_is_never_ready(shop: Stage) -> None:
    seen: list[tuple[str, str]] = []

    def ready() -> tuple[str, str]:
        condition = shop.condition("to-nobody", "Ready")
        seen.append((condition.get("status", ""), condition.get("reason", "")))
        return seen[-1]

    shop.apply(TO_NOBODY)
    wait_until(ready, 120, "the status to say that the broker is unreachable", met=("False", "SinkUnavailable").__eq__)
    assert "True" not in {status for status, _ in seen}, f"Ready before the destination answered: {seen}"
    shop.kubectl("delete", "eventsubscription", "to-nobody")


def holders(stage: Stage) -> set[str]:
    owners = stage.in_postgres("select distinct owner from mailboat.cursors where owner is not null", "shop")
    return set(owners.split())


def looked(stage: Stage, victim: str, seen: list[Seen]) -> Seen:
    held = stage.in_postgres(
        f"select count(*) from mailboat.cursors where owner = '{stage.namespace}/{victim}'", "shop"
    )
    lag = stage.status(NAME).get("lag", 0)
    seen.append(Seen(stage.condition(NAME, "Ready"), lag, int(held)))
    return seen[-1]
