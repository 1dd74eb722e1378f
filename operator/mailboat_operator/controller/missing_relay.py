"""Reconcile the name of an OutboxRelay that does not exist: subscriptions and pods may refer to it.

Kubernetes removes the children of a deleted relay. The operator reports the missing relay on its subscriptions and
pods, and pauses its sidecars: their application pods stay, and only the operator can notify them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.parse import parse_subscription
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import CONFIG_MAP, POD, SUBSCRIPTION, Key
from mailboat_operator.relays.state import RelayStates
from mailboat_operator.resources.configmap import all_paused, configuration_in
from mailboat_operator.resources.ownership import Owner, owner_of
from mailboat_operator.status.conditions import EventNote
from mailboat_operator.status.subscription import SubscriptionFacts, subscription_status
from mailboat_spec import Reason


@dataclass(slots=True)
class MissingRelay:
    """Reconcile loop body for names without a relay."""

    cache: ResourceCache
    relays: RelayStates
    status_writer: StatusWriter
    interval: float
    wall_clock: Callable[[], float] = time.time

    async def reconcile(self, key: Key) -> float | None:
        """Report the missing relay. Return the seconds until the next run; None: wait for an event."""
        for pod in self.cache.pods_of(key):
            if pod.lacks_sidecar:
                await self.status_writer.write_events(POD, pod.reference, [_no_such_relay(key)])
        now = datetime.fromtimestamp(self.wall_clock(), UTC)
        for found in self.cache.subscriptions_of(key):
            facts = SubscriptionFacts(
                name=f"{key[0]}/{found['metadata']['name']}",
                generation=found["metadata"].get("generation", 0),
                before=found.get("status") or {},
                subscription=parse_subscription(found).subscription,
                relay="/".join(key),
                relay_exists=False,
                problem="",
                answers=(),
                lacking=(),
            )
            await self.status_writer.write_status(SUBSCRIPTION, found, subscription_status(facts, now))
        return await self._pause_sidecars(key)

    async def _pause_sidecars(self, key: Key) -> float | None:
        pods = [pod for pod in self.cache.pods_of(key) if pod.alive and not pod.own]
        live = self.cache.child(CONFIG_MAP, key)
        # A ConfigMap without an owner was orphaned on purpose, so that relays keep running with it.
        orphaned = live is not None and owner_of(live, key[1], "") is not Owner.PREDECESSOR
        before = self.relays.pushed_config(key) or await asyncio.to_thread(configuration_in, live)
        if pods and before is not None and not orphaned:
            paused = await asyncio.to_thread(all_paused, before, int(self.wall_clock() * 1000))
            answers = await self.relays.poll(key, pods, {})
            pushed = await self.relays.push_config(key, pods, answers, paused)
            behind = pushed.behind or any(answer.report is None for answer in answers)
            return self.interval if behind else None  # the pushed configuration is kept while these pods exist
        self.relays.forget(key)
        return None


def _no_such_relay(key: Key) -> EventNote:
    message = (
        f'There is no OutboxRelay "{key[1]}" in this namespace: create it, then restart this pod to get its relay.'
    )
    return EventNote(True, Reason.RELAY_NOT_FOUND, message)
