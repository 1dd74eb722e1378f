"""What is known of the cluster: the two kinds of resources, their children, and the pods that carry a relay's label.

Fed from several sides at once (kopf's events, own watches, lists, the answers to our own writes), which may come in
any order; the newest version of an object wins, and a deletion is the last of them: an answer that was on its way when
the object went does not bring it back. Whoever feeds it need not think about who is affected: a change that
matters names the relay, as (namespace, name), to ``on_change``. A status that only we write is no such change, or the
operator would answer its own echo.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

from mailboat_operator.children.deployment import replica_failure, rollout_failure
from mailboat_operator.desired import CHILD_KINDS
from mailboat_operator.kube import DEPLOYMENT, POD, RELAY, SUBSCRIPTION, Kind, Listed, Object
from mailboat_operator.pods import RelayPod, relay_pod
from mailboat_operator.podspec import child_name, relay_of
from mailboat_spec.names import RELAY_LABEL

Key = tuple[str, str]
"""Namespace and name."""

_KINDS: Final = (RELAY, SUBSCRIPTION, POD, *CHILD_KINDS)
_NOISE: Final = frozenset({"resourceVersion", "managedFields", "selfLink"})
_MOURNED: Final = 600.0
"""Seconds for which a lost object is remembered: nothing is on its way for that long."""
_FOR_GOOD: Final = float("inf")


class World:
    """The last known version of everything that matters."""

    def __init__(
        self, on_change: Callable[[Key], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_change = on_change
        self._clock = clock
        self._objects: dict[Kind, dict[Key, Object]] = {kind: {} for kind in _KINDS}
        self._by_relay: dict[Kind, defaultdict[Key, set[Key]]] = {
            kind: defaultdict(set) for kind in (SUBSCRIPTION, POD)
        }
        self._pods: dict[Key, RelayPod] = {}
        self._departed: defaultdict[Key, list[Object]] = defaultdict(list)
        self._lost: dict[str, tuple[float, float]] = {}
        """By uid: the version with which it was lost, and when."""

    def relays(self) -> list[Key]:
        """Every relay that exists, and every one that a subscription refers to."""
        referred = [key for key, names in self._by_relay[SUBSCRIPTION].items() if names]
        return sorted({*self._objects[RELAY], *referred})

    def asked_for(self) -> list[Key]:
        """Relays that only pods refer to: nobody has to be looked after, but somebody waits in vain."""
        return sorted({key for key, names in self._by_relay[POD].items() if names} - set(self.relays()))

    def relay(self, key: Key) -> Object | None:
        return self._objects[RELAY].get(key)

    def subscriptions_of(self, key: Key) -> list[Object]:
        """Oldest first, so that the one that was there before keeps its place."""
        found = [self._objects[SUBSCRIPTION][each] for each in self._by_relay[SUBSCRIPTION].get(key, ())]
        return sorted(found, key=_age)

    def pods_of(self, key: Key) -> list[RelayPod]:
        return [self._pods[each] for each in sorted(self._by_relay[POD].get(key, ()))]

    def child(self, kind: Kind, key: Key) -> Object | None:
        return self._objects[kind].get((key[0], child_name(key[1])))

    def departed(self, key: Key) -> list[Object]:
        """Relay and subscriptions of this name that were deleted since the last time this was asked, each told once.

        Whoever remembers something about them asks at the beginning of a look: none is under way then that could
        remember it anew."""
        return self._departed.pop(key, [])

    def saw(self, kind: Kind, found: Object) -> None:
        """An object as it is now, or was a moment ago."""
        key = _key(found)
        before = self._objects[kind].get(key)
        if self._was_lost_since(found) or (before is not None and _is_older(found, before)):
            return
        self._forget_links(kind, key)
        self._objects[kind][key] = found
        self._link(kind, key, found)
        if before is None or _matters(kind, before, found):
            self._tell(kind, *([] if before is None else [before]), found)

    def lost(self, kind: Kind, gone: Object) -> None:
        """An object was deleted, or left the selection. A successor of the same name stays; so does what came back."""
        self._lose(kind, gone, _version(gone))

    def missing(self, kind: Kind, gone: Object) -> None:
        """The server knows no such object any more: no version of it can follow."""
        self._lose(kind, gone, _FOR_GOOD)

    def _lose(self, kind: Kind, gone: Object, version: float) -> None:
        key, uid = _key(gone), gone["metadata"]["uid"]
        before = self._objects[kind].get(key)
        if before is not None and before["metadata"]["uid"] != uid:
            before = None
        if before is not None and _version(before) > version:
            return
        self._remember_lost(uid, version)
        if before is not None:
            self._forget_links(kind, key)
            del self._objects[kind][key]
            if kind in (RELAY, SUBSCRIPTION):
                for relay in _relays_of(kind, before):
                    self._departed[relay].append(before)
            self._tell(kind, before)

    def _remember_lost(self, uid: str, version: float) -> None:
        now = self._clock()
        self._lost.pop(uid, None)  # so that the oldest stand first
        self._lost[uid] = (version, now)
        for each, (_, at) in list(self._lost.items()):
            if now - at < _MOURNED:
                break
            del self._lost[each]

    def _was_lost_since(self, found: Object) -> bool:
        """By version: what left the selection may return, as a newer version of itself."""
        lost, _ = self._lost.get(found["metadata"]["uid"], (-1, 0.0))
        return _version(found) <= lost

    def listed(self, kind: Kind, listed: Listed, namespace: str | None) -> None:
        """Everything of a kind: what is not in it is gone, unless it is newer than the list."""
        present = {_key(item): item["metadata"]["uid"] for item in listed.items}
        for key, known in list(self._objects[kind].items()):
            outside = namespace is not None and key[0] != namespace
            if outside or present.get(key) == known["metadata"]["uid"]:
                continue
            if _version(known) <= _number(listed.resource_version):
                self._lose(kind, known, _number(listed.resource_version))
        for item in listed.items:
            self.saw(kind, item)

    def _link(self, kind: Kind, key: Key, found: Object) -> None:
        if kind in self._by_relay:
            for relay in _relays_of(kind, found):
                self._by_relay[kind][relay].add(key)
        if kind == POD:
            self._pods[key] = relay_pod(found)

    def _forget_links(self, kind: Kind, key: Key) -> None:
        before = self._objects[kind].get(key)
        if before is not None and kind in self._by_relay:
            for relay in _relays_of(kind, before):
                self._by_relay[kind][relay].discard(key)
                if not self._by_relay[kind][relay]:
                    del self._by_relay[kind][relay]
        if kind == POD:
            self._pods.pop(key, None)

    def _tell(self, kind: Kind, *versions: Object) -> None:
        for relay in {relay for version in versions for relay in _relays_of(kind, version)}:
            self.on_change(relay)


def _relays_of(kind: Kind, found: Object) -> Iterable[Key]:
    metadata = found["metadata"]
    namespace = metadata["namespace"]
    if kind == RELAY:
        return [(namespace, metadata["name"])]
    name = relay_of(found) if kind == SUBSCRIPTION else (metadata.get("labels") or {}).get(RELAY_LABEL)
    return [(namespace, name)] if name else []


def _matters(kind: Kind, before: Object, found: Object) -> bool:
    if kind == POD:
        return relay_pod(before) != relay_pod(found)
    if kind == DEPLOYMENT and any(failure(before) != failure(found) for failure in (replica_failure, rollout_failure)):
        return True
    return _essence(before) != _essence(found)


def _essence(found: Object) -> dict[str, Any]:
    metadata = {name: value for name, value in found["metadata"].items() if name not in _NOISE}
    rest = {name: value for name, value in found.items() if name not in ("status", "metadata")}
    return {**rest, "metadata": metadata}


def _age(found: Object) -> tuple[str, str]:
    metadata = found["metadata"]
    return metadata.get("creationTimestamp") or "", metadata["name"]


def _key(found: Object) -> Key:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _is_older(found: Object, before: Object) -> bool:
    """Whatever the uid: late word of a predecessor must not take the successor's place, only to be deleted then."""
    return _version(found) < _version(before)


def _version(found: Object) -> int:
    return _number(found["metadata"].get("resourceVersion") or "0")


def _number(version: str) -> int:
    """Versions are numbers that rise; Kubernetes says so itself since 1.35."""
    return int(version) if version.isdecimal() else 0
