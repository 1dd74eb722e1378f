"""Apply the children of a relay: create missing ones, revert drift, never touch foreign objects.

A child is applied if the desired object or the live one changed since the operator's last apply; otherwise it costs no
request. Server-side apply decides what to write: it restores owned fields, removes those that are no longer desired,
keeps fields of others, and writes nothing if nothing differs. A new leader has no memory and applies every child once.
A blocked apply is remembered as well: the same object is retried only after a while, since others must remove the
cause (a taken name, a quota, a policy, a value in the spec). A blocked child does not block the others.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mailboat_operator.controller.cache import ResourceCache, essence
from mailboat_operator.kube.client import CONFIG_MAP, Key, Kind, Kube, Object
from mailboat_operator.kube.errors import Forbidden, Invalid, KubeError, NotFound, ServerFailed
from mailboat_operator.metrics import Metrics
from mailboat_operator.resources import CHILD_KINDS, Owner, owner_of
from mailboat_operator.resources.pod import child_name
from mailboat_operator.status.conditions import Blocker, EventNote
from mailboat_spec import OutboxRelay, Reason

log = logging.getLogger(__name__)

_FINALIZER_HINT: Final = (
    ": Kubernetes removes it soon, unless a finalizer of another controller holds it (metadata.finalizers)"
)
_RETRY_FRACTION: Final = 0.8
"""Fraction of ``retry_interval`` for which a blocker is assumed to last. The next scheduled reconcile then retries."""
_NAMED_FIELDS: Final = 3


class DeletionPending(KubeError):
    """A child is being deleted, or soon will be because its previous relay of the same name was deleted."""


class NameTaken(KubeError):
    """A foreign object has the child's name; the message is its kind."""


@dataclass(slots=True)
class ApplyResult:
    child: str
    """Common name of the children."""
    events: list[EventNote] = field(default_factory=list)
    blocked: dict[Kind, KubeError] = field(default_factory=dict)
    """Children that are not in the desired state, each with the error."""
    failed: ServerFailed | DeletionPending | None = None
    """Temporary failure, of the API server or of the operator. Raise it after everything else is done."""

    @property
    def blocker(self) -> Blocker | None:
        """The blocker that others must remove: a taken name, else an invalid child, else a forbidden one."""
        if taken := self._errors(NameTaken):
            remedy = "rename this OutboxRelay, or remove that object."
            problem = f'{" and ".join(taken)} "{self.child}" exists and is not Mailboat\'s, so it is left alone'
            return Blocker(Reason.NAME_TAKEN, f"{problem}: {remedy}")
        if invalid := self._errors(Invalid):
            return Blocker(Reason.INVALID_SPEC, f"The API server refuses what spec leads to: {'; '.join(invalid)}")
        forbidden = self._errors(Forbidden)
        return forbidden_blocker("; ".join(forbidden)) if forbidden else None

    def _errors(self, kind: type[KubeError]) -> list[str]:
        return [str(error) for error in self.blocked.values() if isinstance(error, kind)]


def forbidden_blocker(error: str) -> Blocker:
    """Return the blocker of a request that the API server rejects for now: a quota, a policy, a missing permission."""
    message = f"The API server does not let the operator do its work, which tries again: {error}"
    return Blocker(Reason.FORBIDDEN, message)


@dataclass(slots=True)
class ChildApplier:
    kube: Kube
    cache: ResourceCache
    metrics: Metrics
    retry_interval: float = 30.0
    """Seconds until a blocked apply is retried."""
    clock: Callable[[], float] = time.monotonic
    _applied: dict[tuple[Kind, Key], tuple[Object, Object]] = field(default_factory=dict, init=False)
    """Object of the last apply, and the child as the API server returned it."""
    _errors: dict[tuple[Kind, Key], tuple[KubeError, Object, float]] = field(default_factory=dict, init=False)
    """Error, the object that could not be applied, and the time."""

    def forget(self, key: Key) -> None:
        for kind in CHILD_KINDS:
            self._applied.pop((kind, key), None)
            self._errors.pop((kind, key), None)

    async def find(self, kind: Kind, key: Key) -> Object | None:
        """Return the child as it is. If the cache has none, query the server: the child may only lack its label."""
        if (cached := self.cache.child(kind, key)) is not None:
            return cached
        try:
            return await self.kube.get(kind, key[0], child_name(key[1]))
        except NotFound:
            return None

    async def apply(self, relay: OutboxRelay, desired: dict[Kind, Object]) -> ApplyResult:
        result = ApplyResult(child_name(relay.metadata.name))
        key = (relay.metadata.namespace, relay.metadata.name)
        for kind in (kind for kind in CHILD_KINDS if kind in desired):
            if (recent := self._recent_error(kind, key, desired[kind])) is not None:
                result.blocked[kind] = recent
                continue
            try:
                await self._apply_one(key, relay, kind, desired[kind], result)
            except (NameTaken, Invalid, Forbidden) as error:
                self._errors[kind, key] = (error, desired[kind], self.clock())
                result.blocked[kind] = error
            except (ServerFailed, DeletionPending) as error:
                if kind == CONFIG_MAP and isinstance(error, DeletionPending):
                    raise  # new pods would start with the configuration that is being deleted
                result.blocked[kind] = result.failed = error
        return result

    def _recent_error(self, kind: Kind, key: Key, desired: Object) -> KubeError | None:
        """Return the remembered error for exactly this object, if it is recent."""
        error, of, since = self._errors.get((kind, key), (None, None, 0.0))
        if of == desired and self.clock() - since < _RETRY_FRACTION * self.retry_interval:
            return error
        self._errors.pop((kind, key), None)
        return None

    async def remove(self, relay: OutboxRelay, kinds: Iterable[Kind]) -> None:
        """Delete children that are no longer desired, if the relay owns them and they are in the cache."""
        key = (relay.metadata.namespace, relay.metadata.name)
        for kind in kinds:
            live = self.cache.child(kind, key)
            if live is None or live["metadata"].get("deletionTimestamp"):
                continue
            if owner_of(live, key[1], relay.metadata.uid) is not Owner.OWN:
                continue
            try:
                await self.kube.delete(kind, key[0], live["metadata"]["name"], live["metadata"]["uid"])
            except NotFound:
                self.cache.remove_not_found(kind, live)
            log.info("Deleted orphaned child", extra={"relay": "/".join(key), "kind": kind.name})

    async def _apply_one(self, key: Key, relay: OutboxRelay, kind: Kind, desired: Object, result: ApplyResult) -> None:
        live = await self.find(kind, key)
        if live is None:
            self._remember(kind, key, desired, await self.kube.apply(kind, desired))
            return
        child, owner = f"{kind.name} {child_name(key[1])}", owner_of(live, key[1], relay.metadata.uid)
        if owner is Owner.FOREIGN:
            raise NameTaken(kind.name)
        if owner is Owner.PREDECESSOR:
            raise DeletionPending(f"{child} of the deleted relay is still there{_FINALIZER_HINT}")
        if live["metadata"].get("deletionTimestamp"):
            raise DeletionPending(f"{child} is being deleted{_FINALIZER_HINT}")
        before, applied = self._applied.get((kind, key), (None, None))
        touched = applied is not None and essence(live) != essence(applied)
        if before == desired and not touched:
            return
        applied = await self.kube.apply(kind, desired)
        # After tampering, the desired ConfigMap has a new version, so it differs as well.
        foreign = touched and (before == desired or kind == CONFIG_MAP)
        if foreign and applied["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            self.metrics.drift_corrected.labels(kind.name).inc()
            fields = ", ".join(itertools.islice(_changed(essence(live), essence(applied)), _NAMED_FIELDS))
            note = f"{child} was changed by another client and is restored: {fields}."
            result.events.append(EventNote(True, "DriftCorrected", note))
        self._remember(kind, key, desired, applied)

    def _remember(self, kind: Kind, key: Key, desired: Object, applied: Object) -> None:
        self._applied[kind, key] = (desired, applied)
        self.cache.store(kind, applied)


def _changed(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the fields that differ. A list is one field."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        yield path
        return
    for name in sorted({*before, *after} - {"generation"}):
        if before.get(name) != after.get(name):
            yield from _changed(before.get(name), after.get(name), f"{path}.{name}" if path else name)
