"""Cache of the cluster state: both custom resources, their children, and the pods with relays or consumers.

Updates come from several sources (kopf events, lists, responses to writes) in any order. The newest version of an
object wins. A deletion is final: a response that was in flight during the deletion does not restore the object. A
relevant change calls ``on_change`` with the key of the affected relay, or of the subscription with a source, so sources
need not resolve it. A change of a status that only the operator writes is not relevant; otherwise the operator would
react to its own writes.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from mailboat_operator.kube.client import CONSUMER_POD, DEPLOYMENT, POD, RELAY, SUBSCRIPTION, Key, Kind, Listed, Object
from mailboat_operator.relays.pods import ConsumerPod, RelayPod, consumer_pod, relay_pod
from mailboat_operator.resources import CHILD_KINDS, deployment_failures
from mailboat_operator.resources.pod import child_name, has_source, relay_of
from mailboat_spec.names import RELAY_LABEL, SUBSCRIPTION_LABEL

_CONSUMER: Final = "eventsubscriptions/"
"""Before the name of a subscription with a source. A relay's name has no slash."""

RELAY_KINDS: Final = (RELAY, SUBSCRIPTION, *CHILD_KINDS, POD)
CONSUMER_KINDS: Final = (CONSUMER_POD,)
WATCHED: Final = (*RELAY_KINDS, *CONSUMER_KINDS)
_NOISE: Final = frozenset({"resourceVersion", "managedFields", "selfLink"})
_REMEMBERED: Final = 600.0
"""Seconds for which a deleted object is remembered; no response is in flight for that long."""


class ResourceCache:
    def __init__(
        self, on_change: Callable[[Key], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_change = on_change
        self._clock = clock
        self._objects: dict[Kind, dict[Key, Object]] = {kind: {} for kind in WATCHED}
        self._by_relay: dict[Kind, defaultdict[Key, set[Key]]] = {kind: defaultdict(set) for kind in WATCHED}
        self._deleted: defaultdict[Key, list[Object]] = defaultdict(list)
        self._removed: dict[str, tuple[float, float]] = {}
        """By uid: the version at which the object was removed, and the time."""

    def all_keys(self) -> list[Key]:
        """Every key to reconcile: relays that exist or that a subscription or pod refers to, and consumers.

        If only pods refer to a relay, there is nothing to apply, but the pods need an event.
        """
        return sorted({*self._by_relay[RELAY], *self._by_relay[SUBSCRIPTION], *self._by_relay[POD]})

    def relay(self, key: Key) -> Object | None:
        return self._objects[RELAY].get(key)

    def subscriptions_of(self, key: Key) -> list[Object]:
        """Subscriptions of a relay, oldest first, so that the oldest has precedence."""
        found = [self._objects[SUBSCRIPTION][each] for each in sorted(self._by_relay[SUBSCRIPTION].get(key, ()))]
        return sorted(found, key=lambda each: each["metadata"].get("creationTimestamp") or "")

    def pods_of(self, key: Key) -> list[RelayPod]:
        return [relay_pod(self._objects[POD][each]) for each in sorted(self._by_relay[POD].get(key, ()))]

    def consumer_pods_of(self, key: Key) -> list[ConsumerPod]:
        pods = sorted(self._by_relay[CONSUMER_POD].get(key, ()))
        return [consumer_pod(self._objects[CONSUMER_POD][each]) for each in pods]

    def child(self, kind: Kind, key: Key) -> Object | None:
        return self._objects[kind].get((key[0], child_name(key[1])))

    def take_deleted(self, key: Key) -> list[Object]:
        """Return the relay and subscriptions of this name deleted since the last call, each once.

        Callers drop their state about these objects at the start of a reconcile: then no other reconcile is running
        that could store it again.
        """
        return self._deleted.pop(key, [])

    def store(self, kind: Kind, found: Object) -> None:
        """Store an object, current or slightly outdated."""
        key = _key(found)
        before = self._objects[kind].get(key)
        # Regardless of uid: a late event of a predecessor must not replace the successor and then be deleted.
        is_older = before is not None and _version(found) < _version(before)
        # By version: an object that left the selection may return as a newer version of itself.
        removed, _ = self._removed.get(found["metadata"]["uid"], (-1, 0.0))
        if is_older or _version(found) <= removed:
            return
        self._unlink(kind, key)
        self._objects[kind][key] = found
        if (relay := _relay_key(kind, found)) is not None:
            self._by_relay[kind][relay].add(key)
        if before is None or _is_relevant(kind, before, found):
            self._notify(kind, before or found, found)

    def remove(self, kind: Kind, deleted: Object, version: float | None = None) -> None:
        """Remove an object that was deleted, or left the selection, in this version of it or of a list.

        A newer version or a successor of the name stays. Default: the version of the object.
        """
        key, uid = _key(deleted), deleted["metadata"]["uid"]
        version = _version(deleted) if version is None else version
        before = self._objects[kind].get(key)
        if before is None or before["metadata"]["uid"] != uid:
            self._record_removal(uid, version)
        elif _version(before) <= version:
            self._record_removal(uid, version)
            self._unlink(kind, key)
            del self._objects[kind][key]
            if kind in (RELAY, SUBSCRIPTION) and (relay := _relay_key(kind, before)) is not None:
                self._deleted[relay].append(before)
            self._notify(kind, before)

    def remove_not_found(self, kind: Kind, deleted: Object) -> None:
        """Remove an object that the server answers with 404: no version of it can follow."""
        self.remove(kind, deleted, float("inf"))

    def _record_removal(self, uid: str, version: float) -> None:
        now = self._clock()
        self._removed.pop(uid, None)  # keep the dict ordered by time of removal
        self._removed[uid] = (version, now)
        for each, (_, at) in list(self._removed.items()):
            if now - at < _REMEMBERED:
                break
            del self._removed[each]

    def apply_list(self, kind: Kind, listed: Listed, namespace: str | None) -> None:
        """Apply a full list of a kind. Remove objects missing from the list, unless they are newer than it."""
        present = {_key(item): item["metadata"]["uid"] for item in listed.items}
        for key, cached in list(self._objects[kind].items()):
            inside = namespace in (None, key[0])
            if inside and present.get(key) != cached["metadata"]["uid"]:
                self.remove(kind, cached, _number(listed.resource_version))
        for item in listed.items:
            self.store(kind, item)

    def _unlink(self, kind: Kind, key: Key) -> None:
        before = self._objects[kind].get(key)
        if before is not None and (relay := _relay_key(kind, before)) is not None:
            self._by_relay[kind][relay].discard(key)
            if not self._by_relay[kind][relay]:
                del self._by_relay[kind][relay]

    def _notify(self, kind: Kind, *versions: Object) -> None:
        for relay in {_relay_key(kind, version) for version in versions}:
            if relay is not None:
                self.on_change(relay)


def _relay_key(kind: Kind, found: Object) -> Key | None:
    """Return the key of the relay, or of the subscription with a source, that an object belongs to."""
    metadata = found["metadata"]
    labels = metadata.get("labels") or {}
    if kind == RELAY:
        name = metadata["name"]
    elif kind == SUBSCRIPTION:
        name = _CONSUMER + metadata["name"] if has_source(found) else relay_of(found)
    elif kind == CONSUMER_POD:
        name = _CONSUMER + labels[SUBSCRIPTION_LABEL] if labels.get(SUBSCRIPTION_LABEL) else None
    else:
        name = labels.get(RELAY_LABEL)
    return (metadata["namespace"], name) if name else None


def is_consumer(key: Key) -> bool:
    """Return whether the key belongs to a subscription with a source, not to a relay."""
    return key[1].startswith(_CONSUMER)


def _is_relevant(kind: Kind, before: Object, found: Object) -> bool:
    if kind == POD:
        return relay_pod(before) != relay_pod(found)
    if kind == CONSUMER_POD:
        return consumer_pod(before) != consumer_pod(found)
    if kind == DEPLOYMENT and deployment_failures(before) != deployment_failures(found):
        return True
    return essence(before) != essence(found)


def essence(found: Object) -> dict[str, Any]:
    """Return the object without its status, and without metadata that changes at every write."""
    metadata = {name: value for name, value in found["metadata"].items() if name not in _NOISE}
    rest = {name: value for name, value in found.items() if name not in ("status", "metadata")}
    return {**rest, "metadata": metadata}


def _key(found: Object) -> Key:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _version(found: Object) -> int:
    return _number(found["metadata"].get("resourceVersion") or "0")


def _number(version: str) -> int:
    """Resource versions are increasing numbers, documented by Kubernetes since 1.35."""
    return int(version) if version.isdecimal() else 0
