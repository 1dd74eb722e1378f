"""Story 3: under load, relays are scaled up and down, deleted and created again."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

from namespace import StoryNamespace, violations
from support.wait import wait_until

PARTITIONS = range(8)


def test_scaling_relays_rebalances_the_partitions_under_load(story: StoryNamespace) -> None:
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    with story.trading() as shop:
        for replicas, shares in ((3, [2, 3, 3]), (1, [8])):
            story.kubectl("scale", "obr", "orders", f"--replicas={replicas}")
            wait_until(
                lambda: Views.of(story),
                120,
                f"{replicas} relays to share eight partitions, in the status too",
                met=lambda views, shares=shares: views.agree_on(shares),  # type: ignore[misc]
            )
            story.until_written(200)
    assert shop["committed"] > 400
    assert_each_arrived_once(story, shop["committed"])


def test_deleted_relays_release_their_partitions_and_new_ones_continue(story: StoryNamespace) -> None:
    with story.trading() as shop:
        story.kubectl("delete", "outboxrelay", "orders", "--timeout=180s")
        pods = "app.kubernetes.io/name=mailboat-relay"
        wait_until(lambda: story.all("pods", pods), 180, "no pods of relays", met=lambda left: not left)
        held = "select count(*) from mailboat.cursors where owner is not null"
        assert story.in_postgres(held, "shop").strip() == "0", "partitions were not released"
        story.until_written(200)
        story.apply("relay")
        story.until_ready("orders-to-kafka")
    assert_each_arrived_once(story, shop["committed"])


def assert_each_arrived_once(story: StoryNamespace, committed: int) -> None:
    story.until_lag("orders-to-kafka")
    proof = story.audit("orders")
    assert violations(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["duplicates"] == 0, "duplicates without a crash (G9)"
    assert proof["written"] >= committed


class Views(NamedTuple):
    """Owners of partitions as sorted (partition, pod), by sources that must agree."""

    status: list[tuple[int, str]]
    relays: list[tuple[int, str]]
    """As reported by the relays. A partition with two owners is there twice."""
    alive: set[str]

    @classmethod
    def of(cls, story: StoryNamespace) -> Self:
        assignments = story.status("orders-to-kafka").get("partitions", ())
        alive = {pod["metadata"]["name"] for pod in story.relay_pods()}
        held = [
            (owned["partition"], pod)
            for pod in alive
            for relay in story.relays_in(pod)
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
