"""Relay pods of every OutboxRelay: their last reports, the configuration pushed to them, and the partition assignment.

An assignment is balanced, sticky, and limited to capable pods. A relay can serve a subscription if it reports that it
has built it and if its pod mounts all Secrets that the subscription needs; a running sidecar can't get a new one.
Subscriptions with the same set of capable pods are balanced together, so that all pods carry the same total load.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mailboat_operator.kube.client import Key
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import PushResponse, RelayClient
from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, PodPoll, PollTimeouts, config_version, pod_of, relay_reports
from mailboat_operator.resources.configmap import Configuration
from mailboat_spec.assignment import AssignmentRequest, balance
from mailboat_spec.relay_status import ProcessStatus, RelayStatus

log = logging.getLogger(__name__)

_FURTHEST_AHEAD: Final = 2**61
"""Milliseconds. Added to the current time, the result still fits into a Postgres bigint."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment that was pushed to the relays."""

    generation: int
    owners: Owners
    at: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class ConfigPush:
    behind: bool = False
    """A relay reported an earlier version before the push."""
    in_flight: bool = False
    """A push was accepted or got no answer, so the state may change soon. A refusal counts as settled."""


@dataclass(slots=True)
class _Relay:
    poll: PodPoll[RelayPod, ProcessStatus]
    pushed: Configuration | None = None
    """Last configuration that this process intended for these relays."""
    refusals: dict[str, PushResponse] = field(default_factory=dict)
    """Last refusal of the configuration, by pod uid. The same refusal is logged once."""
    plan: Plan | None = None
    ahead: int = 0
    """Milliseconds added to the clock for new generations, raised after a relay reported a newer generation."""


@dataclass(slots=True)
class RelayStates:
    client: RelayClient
    metrics: Metrics
    timeouts: PollTimeouts
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _relays: dict[Key, _Relay] = field(default_factory=dict, init=False)

    def forget(self, key: Key) -> None:
        self._relays.pop(key, None)
        self.metrics.forget_relay(*key)

    async def poll(self, key: Key, pods: Sequence[RelayPod], partitions: Mapping[str, int]) -> list[Answer]:
        """See ``PodPoll.poll``. ``partitions``: subscriptions that answers may contain, with their partition counts."""
        name = "/".join(key)
        answers = await self._state(key).poll.poll(pods, lambda pod: self.client.status(pod, name, partitions))
        answering = sum(not answer.error for answer in answers)
        self.metrics.relays.labels(*key, "yes").set(answering)
        self.metrics.relays.labels(*key, "no").set(len(answers) - answering)
        return answers

    def _state(self, key: Key) -> _Relay:
        return self._relays.setdefault(key, _Relay(PodPoll(self.timeouts, "relays", self.clock)))

    def pushed_config(self, key: Key) -> Configuration | None:
        return self._state(key).pushed

    async def push_config(self, key: Key, answers: Sequence[Answer], configuration: Configuration) -> ConfigPush:
        """Push the configuration to every relay that reports an earlier version."""
        state = self._state(key)
        state.pushed = configuration
        behind = [each.pod for each in answers if each.report and config_version(each) < configuration.version]

        async def push(pod: RelayPod) -> PushResponse:
            async with state.poll.calls:
                return await self.client.put_config(pod, configuration.packed)

        pushed = dict(zip(behind, await asyncio.gather(*map(push, behind)), strict=True))
        for pod, outcome in pushed.items():
            self.metrics.pushes.labels("config", str(outcome.code)).inc()
            if outcome.code != 200 and state.refusals.get(pod.uid) != outcome:
                extra = {"pod": pod.relay_id, "code": outcome.code, "answer": outcome.text}
                log.warning("Relay refused the configuration, push will be retried", extra=extra)
        state.refusals = {pod.uid: outcome for pod, outcome in pushed.items() if outcome.code != 200}
        return ConfigPush(bool(behind), any(outcome.code in (0, 200) for outcome in pushed.values()))

    async def push_assignment(
        self, key: Key, work: Sequence[Work], answers: Sequence[Answer], configuration: Configuration
    ) -> bool:
        """Compute the assignment and push it if relays hold something else. Return True until they hold it."""
        state = self._state(key)
        name = "/".join(key)
        healthy = [  # relays that keep running and reach the database
            (answer, report)
            for answer, report in relay_reports(answers, name)
            if answer.pod.alive and report.database_reachable and report.state != "Stopping"
        ]

        def plan() -> tuple[Owners, Owners]:
            workers, reported = _workers(healthy, work), _reported(healthy)
            return assign(work, workers, sticky(state.plan, reported, workers)), reported

        desired, reported = await asyncio.to_thread(plan)
        now = self.clock()
        if not needs_push(desired, reported, state.plan, now, self.timeouts.assignment):
            return any(reported.get(partition) != pod for partition, pod in desired.items())
        generation = next_generation(state.plan, int(self.wall_clock() * 1000) + state.ahead)
        request = assignment_of(desired, generation, namespace=key[0])
        current = [answer.pod for answer, _ in healthy if config_version(answer) >= configuration.version]
        for pod in current:  # one relay suffices: it stores the assignment in the database, where the others read it
            outcome = await self.client.put_assignment(pod, request)
            self.metrics.pushes.labels("assignment", str(outcome.code)).inc()
            if outcome.code == 200:
                state.plan = Plan(generation, desired, now)
                log.info("Assignment pushed", extra={"relay": name, "generation": generation})
                return True
            extra = {"pod": pod.relay_id, "code": outcome.code, "answer": outcome.text}
            if outcome.code == 409:  # an operator with a faster clock wrote it; all relays read the same database
                state.ahead = min(max(1000, 2 * state.ahead), _FURTHEST_AHEAD)
                log.warning("Relay has a newer assignment, generation raised", extra=extra)
                return True
            log.warning("Relay refused the assignment, trying another", extra=extra)
        return True


def _workers(healthy: Sequence[tuple[Answer, RelayStatus]], work: Sequence[Work]) -> list[Worker]:
    """Return each pod with its capabilities. A relay is not assigned subscriptions that it lacks or failed to build."""
    needed = frozenset(secret for each in work for secret in each.secrets)
    workers = []
    for answer, report in healthy:
        built = frozenset(each.name for each in report.subscriptions if each.state != "Failed")
        workers.append(Worker(answer.pod.name, built, frozenset(filter(answer.pod.mounts, needed))))
    return workers


def _reported(healthy: Sequence[tuple[Answer, RelayStatus]]) -> Owners:
    """Return the owner of each partition. The owner's own report has precedence over database reads of other relays."""
    owners: dict[Partition, str] = {}
    for answer, report in healthy:
        for each in report.subscriptions:
            held = {(each.name, number): pod_of(owner, answer.pod.namespace) for number, owner in each.owners.items()}
            owners.update({partition: owner for partition, owner in held.items() if owner})
    for answer, report in healthy:
        for each in report.subscriptions:
            owners.update({(each.name, held.partition): answer.pod.name for held in each.owned})
    return owners


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


def sticky(plan: Plan | None, reported: Owners, workers: Collection[Worker]) -> dict[Partition, str]:
    """Return the owners to keep: those of the plan if their pods still exist, else the reported ones.

    The plan comes first, since otherwise every poll of half-moved partitions would produce another plan.
    """
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
