"""Write statuses, Kubernetes events and the metrics of both resources: only changes, and each event once.

The existing status is the memory: events are derived from the difference to it, so a restarted operator does not repeat
them.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.kube.client import DEPLOYMENT, EVENT, RELAY, SUBSCRIPTION, Key, Kind, Kube, Object
from mailboat_operator.kube.errors import KubeError, NotFound, Throttled
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.observation import Observation, ObservedSubscription
from mailboat_operator.resources.pod import sink_secrets
from mailboat_operator.status.conditions import Blocker, EventNote, condition_events, overdue
from mailboat_operator.status.relay import database_changed, relay_status
from mailboat_operator.status.subscription import SubscriptionFacts, subscription_status
from mailboat_spec import FIELD_MANAGER, ConditionType, Reason

log = logging.getLogger(__name__)

_SLOW: Final = frozenset({"rate"})
"""Fields that change constantly while events flow: on their own they are patched only now and then."""
_COUNTERS_EVERY: Final = 60.0
"""Seconds between two patches that change only counters."""
_REPEAT_EVENT_AFTER: Final = 600.0
_LONGEST_NOTE: Final = 1024
_BATCH: Final = 20
"""Statuses built before other tasks get a turn: some milliseconds."""
_BEFORE_RELAYS: Final = frozenset({Reason.CONFIGURATION_HELD, Reason.PROGRESSING})
"""Reasons of blockers that keep a configuration from relays."""


@dataclass(slots=True)
class StatusWriter:
    kube: Kube
    cache: ResourceCache
    metrics: Metrics
    instance: str
    _written: dict[str, float] = field(default_factory=dict, init=False)
    """Time of the last status write, by uid."""
    _sent: dict[tuple[str, EventNote], float] = field(default_factory=dict, init=False)
    """Time of each event, by uid and content."""

    async def write(self, observed: Observation, blocker: Blocker | None, version: int) -> None:
        """Write the statuses of all subscriptions, then that of the relay. Raises ``KubeError``."""
        now = datetime.now(UTC)
        delayed: KubeError | None = None
        unreached = blocker is not None and blocker.reason in _BEFORE_RELAYS
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
        await self._write_relay(observed, blocker, now)
        if delayed is not None:
            raise delayed

    async def _write_relay(self, observed: Observation, blocker: Blocker | None, now: datetime) -> None:
        self.metrics.without_sidecar.labels(*observed.key).set(sum(pod.lacks_sidecar for pod in observed.pods))
        found = observed.found
        status = relay_status(observed, blocker, self.cache.child(DEPLOYMENT, observed.key), now)
        await self.write_status(RELAY, found, status)
        notes = [*overdue(status["conditions"], now), *database_changed(found.get("status") or {}, status)]
        await self.write_events(RELAY, found, notes)

    async def _write_subscription(
        self, observed: Observation, each: ObservedSubscription, now: datetime, *, behind: bool
    ) -> None:
        """``behind``: relays still run an earlier generation. Write the status with that observedGeneration, if any."""
        found = each.found
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        before = found.get("status") or {}
        generation = found["metadata"].get("generation", 0)
        if behind and not each.problem:
            generation = before.get("observedGeneration", generation)
        facts = SubscriptionFacts(
            name=f"{namespace}/{name}",
            generation=generation,
            before=before,
            subscription=each.subscription,
            relay=observed.name,
            problem=each.problem,
            answers=observed.running_answers,
            lacking=observed.lacking(sink_secrets(each.subscription) if each.subscription is not None else ()),
        )
        status = subscription_status(facts, now)
        self.metrics.lag.labels(namespace, name).set(status.get("lag", math.nan))
        await self.write_status(SUBSCRIPTION, found, status)

    async def write_status(self, kind: Kind, found: Object, status: Mapping[str, Any]) -> None:
        """Patch the status, then write its events, so that no event is repeated. Raises ``KubeError``."""
        metadata = found["metadata"]
        ready = any(each["type"] == ConditionType.READY and each["status"] == "True" for each in status["conditions"])
        self.metrics.ready.labels(kind.plural, metadata["namespace"], metadata["name"]).set(ready)
        before = found.get("status") or {}
        due = time.monotonic() - self._written.get(metadata["uid"], float("-inf")) >= _COUNTERS_EVERY
        patch = status_patch(before, status, allow_counters_only=due)
        if patch is None:
            return
        try:
            written = await self.kube.patch_status(kind, found, patch)
        except NotFound:
            self.cache.remove_not_found(kind, found)  # deleted, but the deletion event has not arrived yet
            return
        self._written[metadata["uid"]] = time.monotonic()
        self.metrics.status_patches.labels(kind.plural).inc()
        self.cache.store(kind, written)
        await self.write_events(kind, found, condition_events(before.get("conditions") or (), status["conditions"]))

    async def write_events(self, kind: Kind, found: Object, items: Iterable[EventNote]) -> None:
        """Write events on the resource. Best effort: a failed write is logged and does not affect anything else."""
        for item in items:
            mark = (found["metadata"]["uid"], item)
            now = time.monotonic()
            if now - self._sent.get(mark, float("-inf")) < _REPEAT_EVENT_AFTER:
                continue
            self._sent = {each: at for each, at in self._sent.items() if now - at < _REPEAT_EVENT_AFTER}
            self._sent[mark] = now
            try:
                await self.kube.create(EVENT, _event(kind, found, item, self.instance))
            except KubeError as error:
                log.warning("Event not written: %s", error, extra={"reason": item.reason})

    def forget_deleted(self, key: Key) -> list[Object]:
        """Drop metrics and write times of the resources deleted since the last call, and return these resources."""
        deleted = self.cache.take_deleted(key)
        for resource in deleted:
            metadata = resource["metadata"]
            self._written.pop(metadata["uid"], None)
            of_subscription = resource["kind"] == SUBSCRIPTION.name
            forget = self.metrics.forget_subscription if of_subscription else self.metrics.forget_relay
            forget(metadata["namespace"], metadata["name"])
        return deleted


def status_patch(
    before: Mapping[str, Any], after: Mapping[str, Any], *, allow_counters_only: bool
) -> dict[str, Any] | None:
    """Return the patch, or None. A removed field is set to null, as merge patches require."""
    patch: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value}
    patch.update({key: None for key in before if key not in after})
    only_counters = patch.keys() <= _SLOW
    return None if not patch or (only_counters and not allow_counters_only) else patch


def _event(kind: Kind, found: Object, item: EventNote, instance: str) -> Object:
    metadata = found["metadata"]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}", "namespace": metadata["namespace"]},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": FIELD_MANAGER,
        "reportingInstance": instance[:128],
        "action": "Reconcile",
        "type": "Warning" if item.warning else "Normal",
        "reason": item.reason,
        "note": item.message[:_LONGEST_NOTE],
        "regarding": {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
    }
