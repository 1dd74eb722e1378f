"""Which pod should move which partition: balanced, sticky, and only where it can be done. Pure.

A relay can serve a subscription if it has built it, by its own word, and has all the Secrets that the subscription
needs; a running sidecar can't get a new one. What a relay can't serve it would never hold, however often it is told.
Subscriptions that the same pods can serve are shared out together, so that pods carry equally much over all.

The present plan is what sticks, not what relays report in the middle of a move: otherwise each look at half-moved
partitions would give another plan. Without a plan (the operator has just started) it is the owners that are reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mailboat_spec.assignment import balance

Partition = tuple[str, int]
"""Full name of the subscription, and the number of the partition."""
Owners = Mapping[Partition, str]


@dataclass(frozen=True, slots=True)
class Work:
    """A subscription to be shared out."""

    name: str
    partitions: int
    secrets: frozenset[str]


@dataclass(frozen=True, slots=True)
class Worker:
    """A relay pod that works, the subscriptions that it has built, and the Secrets that it has mounted."""

    pod: str
    serves: frozenset[str]
    secrets: frozenset[str]

    def can(self, work: Work) -> bool:
        return work.name in self.serves and work.secrets <= self.secrets


def assign(work: Iterable[Work], workers: Collection[Worker], owners: Owners) -> dict[Partition, str]:
    """An owner for every partition that any worker can move."""
    groups: dict[frozenset[str], list[Partition]] = defaultdict(list)
    for each in work:
        able = frozenset(worker.pod for worker in workers if worker.can(each))
        groups[able] += [(each.name, number) for number in range(each.partitions)]
    result: dict[Partition, str] = {}
    for able, partitions in sorted(groups.items(), key=lambda group: sorted(group[0])):
        result.update(balance(partitions, able, owners))
    return result


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment that was handed to the relays."""

    generation: int
    owners: Mapping[Partition, str]
    at: float
    """Monotonic seconds."""


def sticky(plan: Plan | None, reported: Owners, workers: Collection[Worker]) -> dict[Partition, str]:
    """What a new assignment should keep: the plan as far as its pods are still there, else what is reported."""
    present = {worker.pod for worker in workers}
    kept = {partition: pod for partition, pod in reported.items() if pod in present}
    if plan is not None:
        kept.update({partition: pod for partition, pod in plan.owners.items() if pod in present})
    return kept


def next_generation(plan: Plan | None, now_ms: int) -> int:
    """Above every earlier one, also above those of an operator that is no more: the clock sees to that."""
    return max(plan.generation + 1 if plan is not None else 0, now_ms)


def worth_pushing(wanted: Owners, reported: Owners, plan: Plan | None, now: float, patience: float) -> bool:
    """Relays hold what is wanted: never. They were told already: not until they have had time to follow."""
    if not wanted or all(reported.get(partition) == pod for partition, pod in wanted.items()):
        return False
    return plan is None or plan.owners != wanted or now - plan.at > patience


def as_request(wanted: Owners, generation: int, namespace: str) -> dict[str, object]:
    """The body of ``PUT /assignment``, in which pods go by the ids of their relays."""
    subscriptions: dict[str, dict[str, str]] = defaultdict(dict)
    for (name, number), pod in sorted(wanted.items()):
        subscriptions[name][str(number)] = f"{namespace}/{pod}"
    return {"generation": generation, "subscriptions": dict(subscriptions)}
