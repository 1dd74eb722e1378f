"""Apply the children of a relay: create missing ones, revert drift, never touch foreign objects.

A child is applied if the desired object or the live one changed since the operator's last apply; otherwise it costs no
request. Server-side apply decides what to write: it restores owned fields, removes those that are no longer desired,
keeps fields of others, and writes nothing if nothing differs. A new leader has no memory and applies every child once.
A blocked apply is remembered as well: the same object is retried only after a while, since others must remove the
cause (a taken name, a quota, a policy, a value in the spec). A blocked child does not block the others.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mailboat_operator.controller.cache import ResourceCache, essence
from mailboat_operator.kube.client import (
    CONFIG_MAP,
    Forbidden,
    Invalid,
    Key,
    Kind,
    Kube,
    KubeError,
    NotFound,
    Object,
    ServerFailed,
)
from mailboat_operator.metrics import Metrics
from mailboat_operator.resources import CHILD_KINDS
from mailboat_operator.resources.ownership import Owner, owner_of
from mailboat_operator.resources.pod import child_name
from mailboat_operator.status.conditions import EventNote, Obstacle
from mailboat_spec import OutboxRelay, Reason

log = logging.getLogger(__name__)

_IF_IT_STAYS: Final = (
    ": Kubernetes removes it soon, unless a finalizer of another controller holds it (metadata.finalizers)"
)
_BELIEVED: Final = 0.8
"""Fraction of ``patience`` for which an obstacle is assumed to persist. The next scheduled reconcile then retries."""
_NAMED_FIELDS: Final = 3


class StillThere(KubeError):
    """A child is being deleted, or soon will be because its previous relay of the same name was deleted."""


class Taken(KubeError):
    """A foreign object has the child's name; the message is its kind."""


@dataclass(slots=True)
class ApplyResult:
    """Result of applying all children."""

    child: str
    """Common name of the children."""
    events: list[EventNote] = field(default_factory=list)
    obstructed: dict[Kind, KubeError] = field(default_factory=dict)
    """Children that are not in the desired state, each with the error."""
    failed: ServerFailed | StillThere | None = None
    """Temporary failure, of the API server or of the operator. Raise it after everything else is done."""

    @property
    def obstacle(self) -> Obstacle | None:
        """The obstacle that others must remove: a taken name, else an invalid child, else a forbidden one."""
        if taken := self._errors(Taken):
            message = (
                f'{" and ".join(taken)} "{self.child}" exists and is not Mailboat\'s, so it is left alone: rename this '
                "OutboxRelay, or remove that object."
            )
            return Obstacle(Reason.NAME_TAKEN, message)
        if invalid := self._errors(Invalid):
            return Obstacle(Reason.INVALID_SPEC, f"The API server refuses what spec leads to: {'; '.join(invalid)}")
        forbidden = self._errors(Forbidden)
        return obstacle_of_rights("; ".join(forbidden)) if forbidden else None

    def _errors(self, kind: type[KubeError]) -> list[str]:
        return [str(error) for error in self.obstructed.values() if isinstance(error, kind)]


def obstacle_of_rights(error: str) -> Obstacle:
    """Return the obstacle of a request that the API server rejects for now: a quota, a policy, a missing permission."""
    message = f"The API server does not let the operator do its work, which tries again: {error}"
    return Obstacle(Reason.FORBIDDEN, message)


@dataclass(slots=True)
class ChildApplier:
    """Children of all relays, with the result of the last apply per child."""

    kube: Kube
    cache: ResourceCache
    metrics: Metrics
    patience: float = 30.0
    """Seconds until a blocked apply is retried."""
    clock: Callable[[], float] = time.monotonic
    _applied: dict[tuple[Kind, Key], tuple[Object, Object]] = field(default_factory=dict, init=False)
    """Object of the last apply, and the child as the API server returned it."""
    _obstacles: dict[tuple[Kind, Key], tuple[KubeError, Object, float]] = field(default_factory=dict, init=False)
    """Error, the object that could not be applied, and the time."""

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted relay."""
        for kind in CHILD_KINDS:
            self._applied.pop((kind, key), None)
            self._obstacles.pop((kind, key), None)

    async def find(self, kind: Kind, key: Key) -> Object | None:
        """Return the child as it is. If the cache has none, query the server: the child may only lack its label."""
        known = self.cache.child(kind, key)
        if known is not None:
            return known
        try:
            return await self.kube.get(kind, key[0], child_name(key[1]))
        except NotFound:
            return None

    async def apply(self, relay: OutboxRelay, wanted: dict[Kind, Object]) -> ApplyResult:
        """Create or repair every desired child."""
        kept = ApplyResult(child_name(relay.metadata.name))
        key = (relay.metadata.namespace, relay.metadata.name)
        for kind in CHILD_KINDS:
            if kind not in wanted:
                continue
            if (known := self._obstacle(kind, key, wanted[kind])) is not None:
                kept.obstructed[kind] = known
                continue
            try:
                await self._apply_one(key, relay, kind, wanted[kind], kept)
            except (Taken, Invalid, Forbidden) as obstacle:
                self._obstacles[kind, key] = (obstacle, wanted[kind], self.clock())
                kept.obstructed[kind] = obstacle
            except (ServerFailed, StillThere) as error:
                if kind == CONFIG_MAP and isinstance(error, StillThere):
                    raise  # new pods would start with the configuration that is being deleted
                kept.obstructed[kind] = kept.failed = error
        return kept

    def _obstacle(self, kind: Kind, key: Key, wanted: Object) -> KubeError | None:
        """Return the remembered error for exactly this object, if it is recent."""
        obstacle, of, since = self._obstacles.get((kind, key), (None, None, 0.0))
        if of == wanted and self.clock() - since < _BELIEVED * self.patience:
            return obstacle
        self._obstacles.pop((kind, key), None)
        return None

    async def remove(self, relay: OutboxRelay, kinds: Iterable[Kind]) -> None:
        """Delete children that are no longer desired, if the relay owns them and they are in the cache."""
        key = (relay.metadata.namespace, relay.metadata.name)
        for kind in kinds:
            live = self.cache.child(kind, key)
            if live is None or owner_of(live, key[1], relay.metadata.uid) is not Owner.OURS:
                continue
            if live["metadata"].get("deletionTimestamp"):
                continue
            try:
                await self.kube.delete(kind, key[0], live["metadata"]["name"], live["metadata"]["uid"])
            except NotFound:
                self.cache.missing(kind, live)
            log.info("Deleted orphaned child", extra={"relay": "/".join(key), "kind": kind.name})

    async def _apply_one(self, key: Key, relay: OutboxRelay, kind: Kind, wanted: Object, kept: ApplyResult) -> None:
        live = await self.find(kind, key)
        if live is None:
            self._remember(kind, key, wanted, await self.kube.apply(kind, wanted))
            return
        match owner_of(live, key[1], relay.metadata.uid):
            case Owner.STRANGER:
                raise Taken(kind.name)
            case Owner.PREDECESSOR:
                raise StillThere(f"{kind.name} {child_name(key[1])} of the deleted relay is still there{_IF_IT_STAYS}")
        if live["metadata"].get("deletionTimestamp"):
            raise StillThere(f"{kind.name} {child_name(key[1])} is being deleted{_IF_IT_STAYS}")
        desired, applied = self._applied.get((kind, key), (None, None))
        touched = applied is not None and essence(live) != essence(applied)
        if desired == wanted and not touched:
            return
        applied = await self.kube.apply(kind, wanted)
        # After tampering, the desired ConfigMap has a new version, so it differs as well.
        foreign = touched and (desired == wanted or kind == CONFIG_MAP)
        if foreign and applied["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            self.metrics.drift_corrected.labels(kind.name).inc()
            fields = ", ".join(itertools.islice(_changed(essence(live), essence(applied)), _NAMED_FIELDS))
            note = f"{kind.name} {child_name(key[1])} was changed by another client and is restored: {fields}."
            kept.events.append(EventNote(True, "DriftCorrected", note))
        self._remember(kind, key, wanted, applied)

    def _remember(self, kind: Kind, key: Key, wanted: Object, applied: Object) -> None:
        self._applied[kind, key] = (wanted, applied)
        self.cache.saw(kind, applied)


def _changed(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the fields that differ. A list is one field."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        yield path
        return
    for name in sorted({*before, *after} - {"generation"}):
        if before.get(name) != after.get(name):
            yield from _changed(before.get(name), after.get(name), f"{path}.{name}" if path else name)
