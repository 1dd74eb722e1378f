"""Reconcile subscriptions with a source: poll the application's pods and write the status.

The consumers run in pods of the application (``runtime: InProcess``), which carry the label
``mailboat.dev/subscription``. The operator creates nothing for them and sends them nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.parse import parse_subscription
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import SUBSCRIPTION, Key
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient
from mailboat_operator.relays.poll import PodPoll, PollTimeouts
from mailboat_operator.relays.totals import RestartTotals
from mailboat_operator.status.consumer import ConsumerFacts, consumer_status
from mailboat_spec.consumer_report import ConsumerReport


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
