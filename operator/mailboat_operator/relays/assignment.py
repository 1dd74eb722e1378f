"""Assignment of partitions to pods: balanced, sticky, and limited to capable pods. Pure.

A relay can serve a subscription if it reports that it has built it and if its pod mounts all Secrets that the
subscription needs; a running sidecar can't get a new one. Subscriptions with the same set of capable pods are balanced
together, so that all pods carry the same total load.

Stickiness follows the current plan, not the owners reported in the middle of a move: otherwise every poll of half-moved
partitions would produce another plan. Without a plan (after a start of the operator) it follows the reported owners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mailboat_spec.assignment import AssignmentRequest, balance

Partition = tuple[str, int]
"""Full name of the subscription, and the partition number."""
Owners = Mapping[Partition, str]


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    partitions: int
    secrets: frozenset[str]


@dataclass(frozen=True, slots=True)
class Worker:
    """A working relay pod, the subscriptions that it has built, and the Secrets that it has mounted."""

    pod: str
    serves: frozenset[str]
    secrets: frozenset[str]

    def can(self, work: Work) -> bool:
        return work.name in self.serves and work.secrets <= self.secrets


def assign(work: Iterable[Work], workers: Collection[Worker], owners: Owners) -> dict[Partition, str]:
    """Return an owner for every partition that any worker can serve."""
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
    """An assignment that was pushed to the relays."""

    generation: int
    owners: Mapping[Partition, str]
    at: float
    """Monotonic seconds."""


def sticky(plan: Plan | None, reported: Owners, workers: Collection[Worker]) -> dict[Partition, str]:
    """Return the owners to keep: those of the plan if their pods still exist, else the reported ones."""
    present = {worker.pod for worker in workers}
    kept = {partition: pod for partition, pod in reported.items() if pod in present}
    if plan is not None:
        kept.update({partition: pod for partition, pod in plan.owners.items() if pod in present})
    return kept


def next_generation(plan: Plan | None, now_ms: int) -> int:
    """Return a generation above every earlier one. The clock keeps it above those of previous operators."""
    return max(plan.generation + 1 if plan is not None else 0, now_ms)


def needs_push(desired: Owners, reported: Owners, plan: Plan | None, now: float, timeout: float) -> bool:
    """Return whether to push: not if relays hold the assignment, and not again before they had time to follow it."""
    if not desired or all(reported.get(partition) == pod for partition, pod in desired.items()):
        return False
    return plan is None or plan.owners != desired or now - plan.at > timeout


def assignment_of(desired: Owners, generation: int, namespace: str) -> AssignmentRequest:
    """Return the body of ``PUT /assignment``, in which pods are named by relay id."""
    subscriptions: dict[str, dict[int, str]] = defaultdict(dict)
    for (name, number), pod in sorted(desired.items()):
        subscriptions[name][number] = f"{namespace}/{pod}"
    return AssignmentRequest(generation=generation, subscriptions=subscriptions)
