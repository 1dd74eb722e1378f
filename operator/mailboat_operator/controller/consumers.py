"""Reconcile subscriptions with a source: poll the application's pods and write the status.

The consumers run in pods of the application (``runtime: InProcess``), which carry the label
``mailboat.dev/subscription``. The operator creates nothing for them and sends them nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import SUBSCRIPTION, Key
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient
from mailboat_operator.relays.observation import parse_subscription
from mailboat_operator.relays.pods import ConsumerPod
from mailboat_operator.relays.reports import PodPoll, PollTimeouts
from mailboat_operator.status.consumer import consumer_status
from mailboat_spec.consumer_report import ConsumerReport


@dataclass(slots=True)
class RestartTotal:
    """Total of a counter of one subscription across restarts: each consumer counts from its start."""

    total: int
    """At first the total in the status, from which a new operator continues."""
    youngest: str | None = None
    """Creation time of the newest pod seen before this operator's first poll or removed since. Only a pod created later
    is certainly new; an older one may reappear (a label removed and added again)."""
    created: Mapping[str, str] = field(default_factory=dict)
    """Creation times of the existing pods, by uid, as Kubernetes writes them."""
    last: dict[str, int | None] = field(default_factory=dict)
    """Last counts of these pods; None if it is unknown how much of it is already in the total."""

    def count(self, counts: Mapping[str, int], existing: Mapping[str, str]) -> int:
        """Return the new total.

        ``counts``: reported counts by pod uid. ``existing``: all existing pods with their creation times; other pods
        are dropped.

        The first count of a pod may already be included in the status, so it adds nothing, unless its pod is new or
        the total is 0. A count that decreased means a new process.
        """
        youngest = max(existing.values(), default="") if self.youngest is None else self.youngest
        self.youngest = max([youngest, *(at for pod, at in self.created.items() if pod not in existing)])
        for pod in existing.keys() - self.created.keys():
            self.last[pod] = 0 if self.total == 0 or existing[pod] > self.youngest else None
        self.created = existing
        self.last = {pod: self.last[pod] for pod in existing}
        for pod, now in counts.items():
            last = self.last[pod]
            previous = now if last is None else last
            self.total += now - previous if now >= previous else now
            self.last[pod] = now
        return self.total


@dataclass(slots=True)
class Consumers:
    cache: ResourceCache
    client: RelayClient
    status_writer: StatusWriter
    metrics: Metrics
    timeouts: PollTimeouts
    interval: float
    _polls: dict[Key, PodPoll[ConsumerPod, ConsumerReport]] = field(default_factory=dict, init=False)
    _dead: dict[str, RestartTotal] = field(default_factory=dict, init=False)
    """Dead letters, by uid of the subscription."""

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one subscription. Return the seconds until the next run; None: wait for an event."""
        for deleted in self.status_writer.forget_deleted(key):
            self._polls.pop(key, None)
            self._dead.pop(deleted["metadata"]["uid"], None)
        if not (subscriptions := self.cache.subscriptions_of(key)):
            return None  # pods refer to a subscription that does not exist, or that reads an outbox
        (found,) = subscriptions
        parsed = parse_subscription(found)
        metadata = found["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        pods = [pod for pod in self.cache.consumer_pods_of(key) if pod.alive]
        poll = self._polls.setdefault(key, PodPoll(self.timeouts, "pods"))
        answers = await poll.poll(pods, lambda pod: self.client.consumer_status(pod, f"{namespace}/{name}"))
        counts = {answer.pod.uid: answer.report.dead for answer in answers if answer.report is not None}
        total = self._dead.setdefault(metadata["uid"], RestartTotal((found.get("status") or {}).get("dead", 0)))
        dead = total.count(counts, {pod.uid: pod.created for pod in pods})
        status = consumer_status(parsed, answers, dead, datetime.now(UTC))
        self.metrics.lag.labels(namespace, name).set(status.get("lag", 0))
        await self.status_writer.write_status(SUBSCRIPTION, found, status)
        return self.interval if pods else None
