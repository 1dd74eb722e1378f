"""Status of a relay and its subscriptions: collect the facts of one reconcile and write both statuses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.observation import Observation, ObservedSubscription
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import DEPLOYMENT, RELAY, SUBSCRIPTION, Key, KubeError, Throttled
from mailboat_operator.metrics import Metrics
from mailboat_operator.resources.deployment import replica_failure, rollout_failure
from mailboat_operator.resources.pod import sink_secrets
from mailboat_operator.status.conditions import Obstacle, overdue
from mailboat_operator.status.relay import RelayFacts, database_changed, relay_status
from mailboat_operator.status.subscription import SubscriptionFacts, subscription_status
from mailboat_spec import Reason

_BATCH: Final = 20
"""Statuses built before other tasks get a turn: some milliseconds."""
_BEFORE_RELAYS: Final = frozenset({Reason.CONFIGURATION_HELD, Reason.PROGRESSING})
"""Reasons of obstacles that keep a configuration from relays."""


@dataclass(slots=True)
class StatusReport:
    """Statuses and metrics of all relays and their subscriptions."""

    cache: ResourceCache
    status_writer: StatusWriter
    metrics: Metrics
    wall_clock: Callable[[], float] = time.time

    async def write(self, observed: Observation, obstacle: Obstacle | None, version: int) -> None:
        """Write the statuses of all subscriptions, then that of the relay. Raises ``KubeError``."""
        now = datetime.fromtimestamp(self.wall_clock(), UTC)
        delayed: KubeError | None = None
        unreached = obstacle is not None and obstacle.reason in _BEFORE_RELAYS
        behind = unreached or observed.is_behind(version)
        for number, each in enumerate(observed.subscriptions):
            if number % _BATCH == 0:
                await asyncio.sleep(0)
            try:
                await self._write_subscription(observed, each, now, behind=behind)
            except Throttled:
                raise
            except KubeError as error:  # concerns this subscription only; still report the others and the relay
                delayed = error
        await self._write_relay(observed, obstacle, now)
        if delayed is not None:
            raise delayed

    async def _write_relay(self, observed: Observation, obstacle: Obstacle | None, now: datetime) -> None:
        deployment = self.cache.child(DEPLOYMENT, observed.key)
        secrets = observed.secrets
        facts = RelayFacts(
            name=observed.name,
            generation=observed.found["metadata"].get("generation", 0),
            before=observed.found.get("status") or {},
            relay=observed.relay,
            problem=observed.problem,
            obstacle=obstacle,
            uncreated=replica_failure(deployment),
            halted=rollout_failure(deployment),
            pods=observed.pods,
            answers=observed.running_answers,
            subscriptions=len(observed.subscriptions),
            lacking=[pod for pod in observed.pods if pod.alive and not all(pod.sees(each) for each in secrets)],
            selector=observed.selector,
        )
        self.metrics.without_sidecar.labels(*observed.key).set(sum(pod.lacks_sidecar for pod in observed.pods))
        status = relay_status(facts, now)
        await self.status_writer.write_status(RELAY, observed.found, status)
        await self.status_writer.write_events(RELAY, observed.found, overdue(status["conditions"], now))
        await self.status_writer.write_events(RELAY, observed.found, database_changed(facts.before, status))

    async def _write_subscription(
        self, observed: Observation, each: ObservedSubscription, now: datetime, *, behind: bool
    ) -> None:
        """``behind``: relays still run an earlier generation. Write the status with that observedGeneration, if any."""
        found = each.parsed.found
        metadata = found["metadata"]
        before = found.get("status") or {}
        generation = metadata.get("generation", 0)
        if behind and each.parsed.subscription is not None:
            generation = before.get("observedGeneration", generation)
        needed = sink_secrets(each.subscription) if each.subscription is not None else ()
        facts = SubscriptionFacts(
            name=f"{metadata['namespace']}/{metadata['name']}",
            generation=generation,
            before=before,
            subscription=each.subscription,
            relay=observed.name,
            relay_exists=True,
            problem=each.parsed.problem,
            answers=observed.running_answers,
            lacking=[pod for pod in observed.pods if pod.alive and not all(pod.sees(name) for name in needed)],
        )
        status = subscription_status(facts, now)
        self.metrics.lag.labels(metadata["namespace"], metadata["name"]).set(status.get("lag", math.nan))
        await self.status_writer.write_status(SUBSCRIPTION, found, status)

    def forget_deleted(self, key: Key) -> None:
        """Drop metrics and write times of the relay and the subscriptions that were deleted since the last call."""
        for gone in self.cache.departed(key):
            metadata = gone["metadata"]
            self.status_writer.forget(metadata["uid"])
            of_subscription = gone["kind"] == SUBSCRIPTION.name
            forget = self.metrics.forget_subscription if of_subscription else self.metrics.forget_relay
            forget(metadata["namespace"], metadata["name"])
