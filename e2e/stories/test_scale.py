"""Story 3: more relays, fewer relays, none at all and others in their place, while events flow."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

from namespace import Stage, wrong_in
from support.wait import wait_until

PARTITIONS = range(8)


def test_partitions_follow_the_relays_up_and_down_under_load(stage: Stage) -> None:
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    with stage.trading() as shop:
        for replicas, shares in ((3, [2, 3, 3]), (1, [8])):
            stage.kubectl("scale", "obr", "orders", f"--replicas={replicas}")
            wait_until(
                lambda: Views.of(stage),
                120,
                f"eight partitions to be shared by {replicas} relays, and the status to say so",
                met=lambda views, shares=shares: views.agree_on(shares),  # type: ignore[misc]
            )
            stage.until_written(200)
    assert shop["committed"] > 400
    assert_each_arrived_once(stage, shop["committed"])


def test_relays_whose_resource_is_deleted_let_go_in_order_and_others_go_on_from_there(stage: Stage) -> None:
    with stage.trading() as shop:
        stage.kubectl("delete", "outboxrelay", "orders", "--timeout=180s")
        pods = "app.kubernetes.io/name=mailboat-relay"
        wait_until(lambda: stage.all("pods", pods), 180, "its relays to go", met=lambda left: not left)
        held = "select count(*) from mailboat.cursors where owner is not null"
        assert stage.in_postgres(held, "shop").strip() == "0", "they have let go of their partitions"
        stage.until_written(200)
        stage.apply("relay")
        stage.until_ready("orders-to-kafka")
    assert_each_arrived_once(stage, shop["committed"])


def assert_each_arrived_once(stage: Stage, committed: int) -> None:
    stage.until_lag("orders-to-kafka")
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["duplicates"] == 0, "nobody crashed: a partition that moves is handed over in order (G9)"
    assert proof["written"] >= committed


class Views(NamedTuple):
    """Who holds which partition, by three accounts that must agree: (partition, pod), sorted."""

    status: list[tuple[int, str]]
    relays: list[tuple[int, str]]
    """By the relays' own word: one that two claim is there twice."""
    alive: set[str]

    @classmethod
    def of(cls, stage: Stage) -> Self:
        assignments = stage.status("orders-to-kafka").get("partitions", ())
        alive = {pod["metadata"]["name"] for pod in stage.relay_pods()}
        held = [
            (owned["partition"], pod)
            for pod in alive
            for relay in stage.relays_in(pod)
            for subscription in relay["subscriptions"]
            for owned in subscription["owned"]
        ]
        return cls(sorted((each["partition"], each.get("pod", "")) for each in assignments), sorted(held), alive)

    def agree_on(self, shares: list[int]) -> bool:
        each_once = [partition for partition, _ in self.relays] == list(PARTITIONS)
        per_pod = Counter(pod for _, pod in self.relays)
        return (
            each_once
            and self.status == self.relays
            and per_pod.keys() == self.alive
            and sorted(per_pod.values()) == shares
        )
