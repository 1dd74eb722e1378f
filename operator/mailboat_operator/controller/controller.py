"""The leader's work: watches, the work queue, and the workers that reconcile one relay after the other.

No namespace is reconciled before all its lists are complete. A relay whose subscriptions are not listed yet would
receive a configuration without them and drop their progress. Namespaces given by name start independently: an
unreadable one (deleted, together with the RoleBindings in it) does not delay the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mailboat_operator.controller.cache import ResourceCache, is_consumer
from mailboat_operator.controller.children import ChildApplier, StillThere
from mailboat_operator.controller.consumers import Consumers
from mailboat_operator.controller.kopf_feed import KopfFeed
from mailboat_operator.controller.reconcile import Reconciler
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.controller.watch import Watcher
from mailboat_operator.controller.workqueue import Backoff, WorkQueue
from mailboat_operator.kube.client import (
    CONSUMER_POD,
    POD,
    RELAY,
    SUBSCRIPTION,
    Conflict,
    Key,
    Kind,
    Kube,
    KubeError,
    Object,
)
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient, Signer
from mailboat_operator.relays.poll import PollTimeouts
from mailboat_operator.relays.state import RelayStates
from mailboat_operator.resources import CHILD_KINDS
from mailboat_operator.resources.pod import RelayImage
from mailboat_spec.names import MANAGED_BY, MANAGED_BY_LABEL, RELAY_LABEL, SUBSCRIPTION_LABEL

log = logging.getLogger(__name__)

_CHILDREN: Final = f"{RELAY_LABEL},{MANAGED_BY_LABEL}={MANAGED_BY}"
_OUR_KINDS: Final = ((RELAY, ""), (SUBSCRIPTION, ""))
"""Kinds with their label selectors, like ``_WATCHED``."""
_WATCHED: Final = (*((kind, _CHILDREN) for kind in CHILD_KINDS), (POD, RELAY_LABEL), (CONSUMER_POD, SUBSCRIPTION_LABEL))
_OBSTRUCTED: Final = 6
"""Status intervals until a blocked child is retried. Others must remove the cause: a taken name, a quota, a policy."""
_COMPARE_AFTER: Final = 1.0
"""Seconds after kopf re-listed: by then it has emitted every existing object."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of the leader's work."""

    image: RelayImage
    namespaces: tuple[str, ...] = ()
    """Empty: all namespaces."""
    instance: str = "mailboat-operator"
    """Reporting instance of Kubernetes events."""
    status_interval: float = 5.0
    relay_timeout: float = 3.0
    workers: int = 8
    compare_interval: float = 300.0
    """Seconds between two comparisons of the cache with full lists, independent of watch events."""
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def patience(self) -> PollTimeouts:
        return PollTimeouts(
            silence=max(3 * self.status_interval, 3.0),
            following=max(6 * self.status_interval, 5.0),
            asking=max(2 * self.relay_timeout, 10.0),
        )


async def run_controller(kube: Kube, settings: ControllerSettings, signing: Signer, metrics: Metrics) -> None:
    """Run until cancelled. Raise only on errors that a retry can't resolve."""
    kube.on_request = metrics.on_request
    queue: WorkQueue[Key] = WorkQueue(settings.backoff)
    cache = ResourceCache()
    async with RelayClient(signing, timeout=settings.relay_timeout) as client:
        status_writer = StatusWriter(kube, cache, metrics, settings.instance)
        reconciler = Reconciler(
            cache,
            ChildApplier(kube, cache, metrics, _OBSTRUCTED * settings.status_interval),
            RelayStates(client, metrics, settings.patience),
            status_writer,
            metrics,
            signing,
            settings.image,
            settings.status_interval,
        )
        consumers = Consumers(cache, client, status_writer, metrics, settings.patience, settings.status_interval)
        await _Controller(kube, settings, metrics, cache, queue, reconciler, consumers).run()


class _WatchScope:
    """One scope, a single namespace or all of them. No relay in it is reconciled before its lists are complete."""

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self.watchers: list[Watcher] = []
        self.known = asyncio.Event()
        """Set once every list is in the cache (``ResourceCache``)."""
        self.compare = asyncio.Event()
        """Set when kopf or a watch may have missed deletions."""

    @property
    def name(self) -> str:
        return self.namespace or "all namespaces"

    def has(self, namespace: str) -> bool:
        return self.namespace in (None, namespace)


class _Controller:
    def __init__(
        self,
        kube: Kube,
        settings: ControllerSettings,
        metrics: Metrics,
        cache: ResourceCache,
        queue: WorkQueue[Key],
        reconciler: Reconciler,
        consumers: Consumers,
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._metrics = metrics
        self._cache = cache
        self._queue = queue
        self._reconciler = reconciler
        self._consumers = consumers
        self._begun = asyncio.Event()
        """Set once the lists of one scope are complete."""
        self._places = [_WatchScope(namespace) for namespace in settings.namespaces or (None,)]

    async def run(self) -> None:
        self._metrics.leader.set(1)
        self._metrics.queue.set_function(self._queue.waiting)
        self._cache.on_change = self._changed
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in self._places:
                    place.watchers = [
                        Watcher(self._kube, self._cache, kind, place.namespace, selector, place.compare.set)
                        for kind, selector in _WATCHED
                    ]
                    for watcher in place.watchers:
                        tasks.create_task(watcher.run())
                    tasks.create_task(self._look_after(place))
                tasks.create_task(self._feed())
                for _ in range(self._settings.workers):
                    tasks.create_task(self._work())
        finally:
            self._metrics.leader.set(0)
            self._metrics.queue.set_function(lambda: 0)

    async def _feed(self) -> None:
        """Run kopf, and restart it with back-off if it ends.

        kopf starts only after the API server answered once: kopf logs every request that waits for the server as an
        error. Both kinds must be discoverable before the start, since kopf runs discovery only once. Events missed
        during a restart are found by comparing lists.
        """
        await self._begun.wait()
        for attempt in itertools.count():
            try:
                for kind, _ in _OUR_KINDS:
                    await self._until_known(kind)
                await KopfFeed(self._kube.access, self._settings.namespaces, self._heard).run()
            except Exception as error:
                delay = self._settings.backoff.delay(attempt)
                log.warning("The watch of resources ended; it begins anew.", extra={"error": str(error) or repr(error)})
                await asyncio.sleep(delay)
            for place in self._places:
                place.compare.set()

    async def _until_known(self, kind: Kind) -> None:
        for attempt in itertools.count():
            if await self._kube.is_known(kind):
                return
            await asyncio.sleep(self._settings.backoff.delay(attempt))

    def _changed(self, key: Key) -> None:
        """Queue a relay. If its scope is not listed completely yet, the initial reconcile covers the change."""
        if any(place.known.is_set() for place in self._places if place.has(key[0])):
            self._queue.add(key)

    async def _look_after(self, place: _WatchScope) -> None:
        for watcher in place.watchers:
            await watcher.synced.wait()
        await self._list_at_last(_OUR_KINDS, place)
        place.known.set()
        self._begun.set()
        found = [key for key in (*self._cache.relays(), *self._cache.asked_for()) if place.has(key[0])]
        for key in found:
            self._queue.add(key)
        log.info("Everything that is there is known.", extra={"namespace": place.name, "relays": len(found)})
        await self._compare_for_ever(place)

    def _heard(self, type_: str | None, kind: Kind, found: Object) -> None:
        """Apply one event from kopf to the cache. Type None means that kopf re-listed, so compare lists."""
        if type_ == "DELETED":
            self._cache.lost(kind, found)
            return
        self._cache.saw(kind, found)
        if type_ is None:
            for place in self._places:
                if place.has(found["metadata"]["namespace"]):
                    place.compare.set()

    async def _work(self) -> None:
        while True:
            key = await self._queue.next()
            began = time.perf_counter()
            try:
                again = await (self._consumers if is_consumer(key) else self._reconciler).reconcile(key)
            except KubeError as error:
                self._put_off(key, error)
            except Exception:
                # A bug that affects one relay must not stop the reconciles of the others.
                log.exception("A look at a relay failed.", extra={"relay": "/".join(key)})
                self._metrics.reconciles.labels("failed").inc()
                self._queue.failed(key)
            else:
                self._metrics.reconciles.labels("done").inc()
                self._queue.succeeded(key, None if again is None else again * random.uniform(0.9, 1.1))
            self._metrics.reconcile_seconds.observe(time.perf_counter() - began)

    def _put_off(self, key: Key, error: KubeError) -> None:
        delay = self._queue.failed(key, error.retry_after)
        expected = isinstance(error, Conflict | StillThere)
        self._metrics.reconciles.labels("conflict" if expected else "unavailable").inc()
        log.log(
            logging.INFO if expected else logging.WARNING,
            "A look at a relay could not be finished; it will be taken up again.",
            extra={"relay": "/".join(key), "error": str(error), "seconds": round(delay, 1)},
        )

    async def _compare_for_ever(self, place: _WatchScope) -> None:
        """Re-list custom resources if deletions may have been missed (see ``handlers``), and all kinds periodically."""
        while True:
            kinds: Sequence[tuple[Kind, str]] = _OUR_KINDS
            try:
                async with asyncio.timeout(self._settings.compare_interval):
                    await place.compare.wait()
                await asyncio.sleep(_COMPARE_AFTER)
            except TimeoutError:
                kinds = (*_OUR_KINDS, *_WATCHED)
                for key in self._cache.relays():
                    if place.has(key[0]):
                        self._queue.add(key)
            place.compare.clear()
            await self._list_at_last(kinds, place)

    async def _list_at_last(self, kinds: Sequence[tuple[Kind, str]], place: _WatchScope) -> None:
        """List until it succeeds, with back-off."""
        for attempt in itertools.count():
            try:
                for kind, selector in kinds:
                    listed = await self._kube.list(kind, place.namespace, selector)
                    self._cache.listed(kind, listed, place.namespace)
                return
            except KubeError as error:
                delay = max(self._settings.backoff.delay(attempt), error.retry_after or 0.0)
                extra = {"namespace": place.name, "error": str(error), "seconds": round(delay, 1)}
                log.warning("A namespace can't be read: its relays wait, others do not.", extra=extra)
                await asyncio.sleep(delay)
