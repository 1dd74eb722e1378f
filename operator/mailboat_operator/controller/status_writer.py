"""Write statuses and Kubernetes events: only changes, and each event once.

The existing status is the memory: events are derived from the difference to it, so a restarted operator does not repeat
them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.kube.client import EVENT, Kind, Kube, KubeError, NotFound, Object
from mailboat_operator.metrics import Metrics
from mailboat_operator.status.conditions import EventNote, condition_events
from mailboat_spec import FIELD_MANAGER, ConditionType

log = logging.getLogger(__name__)

_SLOW: Final = frozenset({"rate"})
"""Fields that change constantly while events flow: on their own they are patched only now and then."""
_COUNTERS_EVERY: Final = 60.0
"""Seconds between two patches that change only counters."""
_SAME_NEWS_EVERY: Final = 600.0
_LONGEST_NOTE: Final = 1024


@dataclass(slots=True)
class StatusWriter:
    """Status writer for all resources, with the time of the last write per resource."""

    kube: Kube
    cache: ResourceCache
    metrics: Metrics
    instance: str
    """Reporting instance of Kubernetes events."""
    clock: Callable[[], float] = time.monotonic
    _written: dict[str, float] = field(default_factory=dict, init=False)
    """Time of the last status write, by uid."""
    _told: dict[tuple[str, EventNote], float] = field(default_factory=dict, init=False)
    """Time of each event, by uid and content."""

    async def write_status(self, kind: Kind, found: Object, status: Mapping[str, Any]) -> None:
        """Patch the status, then write its events, so that no event is repeated. Raises ``KubeError``."""
        metadata = found["metadata"]
        ready = any(each["type"] == ConditionType.READY and each["status"] == "True" for each in status["conditions"])
        self.metrics.ready.labels(kind.plural, metadata["namespace"], metadata["name"]).set(ready)
        before = found.get("status") or {}
        due = self.clock() - self._written.get(metadata["uid"], float("-inf")) >= _COUNTERS_EVERY
        patch = status_patch(before, status, only_counters_may=due)
        if patch is None:
            return
        try:
            written = await self.kube.patch_status(kind, found, patch)
        except NotFound:
            self.cache.missing(kind, found)  # deleted, but the deletion event has not arrived yet
            return
        self._written[metadata["uid"]] = self.clock()
        self.metrics.status_patches.labels(kind.plural).inc()
        self.cache.saw(kind, written)
        await self.write_events(kind, found, condition_events(before.get("conditions") or (), status["conditions"]))

    async def write_events(self, kind: Kind, found: Object, items: Iterable[EventNote]) -> None:
        """Write events on the resource. Best effort: a failed write is logged and does not affect anything else."""
        for item in items:
            mark = (found["metadata"]["uid"], item)
            now = self.clock()
            if now - self._told.get(mark, float("-inf")) < _SAME_NEWS_EVERY:
                continue
            self._told = {each: at for each, at in self._told.items() if now - at < _SAME_NEWS_EVERY}
            self._told[mark] = now
            try:
                await self.kube.create(EVENT, _event(kind, found, item, self.instance))
            except KubeError as error:
                log.warning("Event not written: %s", error, extra={"reason": item.reason})

    def forget(self, uid: str) -> None:
        self._written.pop(uid, None)


def status_patch(
    before: Mapping[str, Any], after: Mapping[str, Any], *, only_counters_may: bool
) -> dict[str, Any] | None:
    """Return the patch, or None. A removed field is set to null, as merge patches require."""
    patch: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value}
    patch.update({key: None for key in before if key not in after})
    if not patch or (not only_counters_may and patch.keys() <= _SLOW):
        return None
    return patch


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
