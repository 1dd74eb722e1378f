"""Reconcile subscriptions with a source: poll the application's pods and write the status.

The consumers run in pods of the application (``runtime: InProcess``), which carry the label
``mailboat.dev/subscription``. The operator creates nothing for them and sends them nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.observation import parse_subscription
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import SUBSCRIPTION, Key
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient
from mailboat_operator.relays.reports import PodPoll, PollTimeouts
from mailboat_operator.status.consumer import ConsumerFacts, consumer_status
from mailboat_spec.consumer_report import ConsumerReport


@dataclass(slots=True)
class _Pod:
    created: str
    """Creation time of its pod, as Kubernetes writes it."""
    count: int | None
    """Count in the last answer; None if it is unknown how much of it is already in the total."""


@dataclass(slots=True)
class _Counted:
    total: int
    youngest: str
    """Creation time of the newest pod seen before this operator's first poll or removed since. Only a pod created later
    is certainly new; an older one may reappear (a label removed and added again)."""
    pods: dict[str, _Pod] = field(default_factory=dict)
    """By pod uid."""


class RestartTotals:
    """Totals of a counter across restarts, by subscription: each consumer counts from its start."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}

    def count(self, uid: str, before: int, counts: Mapping[str, int], existing: Mapping[str, str]) -> int:
        """Return the new total.

        ``before``: total in the status, from which a new operator continues. ``counts``: reported
        counts by pod uid. ``existing``: all existing pods with their creation times; other pods are dropped.

        The first count of a pod may already be included in the status, so it adds nothing, unless its pod is new or
        the total is 0. A count that decreased means a new process.
        """
        counted = self._counted.get(uid)
        if counted is None:
            counted = self._counted[uid] = _Counted(before, youngest=max(existing.values(), default=""))
        for pod in counted.pods.keys() - existing.keys():
            counted.youngest = max(counted.youngest, counted.pods.pop(pod).created)
        for pod in existing.keys() - counted.pods.keys():
            new = counted.total == 0 or existing[pod] > counted.youngest
            counted.pods[pod] = _Pod(existing[pod], count=0 if new else None)
        for pod, now in counts.items():
            entry = counted.pods[pod]
            previous = now if entry.count is None else entry.count
            counted.total += now - previous if now >= previous else now
            entry.count = now
        return counted.total

    def forget(self, uid: str) -> None:
        self._counted.pop(uid, None)


@dataclass(slots=True)
class Consumers:
    """Reconcile loop body for all subscriptions with a source."""

    cache: ResourceCache
    client: RelayClient
    status_writer: StatusWriter
    metrics: Metrics
    timeouts: PollTimeouts
    interval: float
    wall_clock: Callable[[], float] = time.time
    _polls: dict[Key, PodPoll[ConsumerReport]] = field(default_factory=dict, init=False)
    _dead: RestartTotals = field(default_factory=RestartTotals, init=False)

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one subscription. Return the seconds until the next run; None: wait for an event."""
        for deleted in self.status_writer.forget_deleted(key):
            self._polls.pop(key, None)
            self._dead.forget(deleted["metadata"]["uid"])
        if not (subscriptions := self.cache.subscriptions_of(key)):
            return None  # pods refer to a subscription that does not exist, or that reads an outbox
        (found,) = subscriptions
        parsed = parse_subscription(found)
        metadata, before = found["metadata"], found.get("status") or {}
        name = f"{metadata['namespace']}/{metadata['name']}"
        pods = [pod for pod in self.cache.consumer_pods_of(key) if pod.alive]
        poll = self._polls.setdefault(key, PodPoll(self.timeouts, "pods"))
        answers = await poll.poll(pods, lambda pod: self.client.consumer_status(pod, name))
        reports = {
            pod.uid: answer.report for pod, answer in zip(pods, answers, strict=True) if answer.report is not None
        }
        created = {pod.uid: pod.created for pod in pods}
        dead = {uid: report.dead for uid, report in reports.items()}
        facts = ConsumerFacts(
            generation=metadata.get("generation", 0),
            before=before,
            subscription=parsed.subscription,
            problem=parsed.problem,
            answers=answers,
            dead=self._dead.count(metadata["uid"], before.get("dead", 0), dead, created),
        )
        status = consumer_status(facts, datetime.fromtimestamp(self.wall_clock(), UTC))
        self.metrics.lag.labels(metadata["namespace"], metadata["name"]).set(status.get("lag", 0))
        await self.status_writer.write_status(SUBSCRIPTION, found, status)
        return self.interval if pods else None
