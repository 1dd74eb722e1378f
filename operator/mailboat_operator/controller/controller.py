"""The controller: kopf's events fill the cache, changes fill the work queue, workers reconcile one key after the other.

States of a watch scope (one namespace, or all of them):

    starting    a watch is not open yet, or a list is missing: changes are cached, and nothing is reconciled
    synced      every kind was listed while its watch was open: relays are reconciled

No namespace is reconciled before all its lists are complete. A relay whose subscriptions are not listed yet would
receive a configuration without them and drop their progress. Namespaces given by name start independently: an
unreadable one (deleted, together with the RoleBindings in it) does not delay the others.

A scope never leaves *synced*. When kopf had to list a kind again, the controller lists it as well, since only the
comparison with the cache finds deletions (see ``kopf_feed``). Independent of kopf, all kinds are compared every
``compare_interval``. Both cost reads only.
"""

import asyncio
import itertools
import logging
import random
import time
from dataclasses import dataclass, field
from typing import Final

from mailboat_operator.controller.cache import CONSUMER_KINDS, RELAY_KINDS, WATCHED, ResourceCache, is_consumer
from mailboat_operator.controller.children import ChildApplier, DeletionPending
from mailboat_operator.controller.consumers import Consumers
from mailboat_operator.controller.kopf_feed import KopfFeed
from mailboat_operator.controller.reconcile import Reconciler
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.controller.workqueue import Backoff, WorkQueue
from mailboat_operator.kube.client import RELAY, SUBSCRIPTION, Key, Kind, Kube
from mailboat_operator.kube.errors import Conflict, KubeError
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient
from mailboat_operator.relays.reports import PollTimeouts
from mailboat_operator.relays.signing_keys import Signer
from mailboat_operator.relays.state import RelayStates
from mailboat_operator.resources.pod import RelayImage

log = logging.getLogger(__name__)

_BLOCKED_RETRY: Final = 6
"""Status intervals until a blocked child is retried. Others must remove the cause: a taken name, a quota, a policy."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
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


async def run_controller(kube: Kube, settings: ControllerSettings, signer: Signer, metrics: Metrics) -> None:
    """Run until cancelled. Raise only on errors that a retry can't resolve."""
    kube.on_request = metrics.on_request
    cache = ResourceCache()
    timeouts = PollTimeouts(
        silence=max(3 * settings.status_interval, 3.0),
        assignment=max(6 * settings.status_interval, 5.0),
        poll=max(2 * settings.relay_timeout, 10.0),
    )
    async with RelayClient(signer, timeout=settings.relay_timeout) as client:
        status_writer = StatusWriter(kube, cache, metrics, settings.instance)
        reconciler = Reconciler(
            cache,
            ChildApplier(kube, cache, metrics, _BLOCKED_RETRY * settings.status_interval),
            RelayStates(client, metrics, timeouts),
            status_writer,
            signer,
            settings.image,
            settings.status_interval,
        )
        consumers = Consumers(cache, client, status_writer, metrics, timeouts, settings.status_interval)
        await Controller(kube, settings, metrics, cache, reconciler, consumers).run()


@dataclass(slots=True)
class _WatchScope:
    namespace: str | None
    unlisted: set[Kind] = field(default_factory=lambda: set(WATCHED))
    """Kinds that were not listed yet while their watch was open."""
    outdated: set[Kind] = field(default_factory=set)
    """Kinds whose watch was opened after a list of kopf: deletions before it must be found."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    unreadable: dict[Kind, str] = field(default_factory=dict)
    """Status codes of failing requests, by kind. The same failure is logged once."""

    @property
    def name(self) -> str:
        return self.namespace or "all namespaces"

    def has(self, namespace: str) -> bool:
        return self.namespace in (None, namespace)


@dataclass(slots=True)
class Controller:
    """Watches, queue and workers of the leader. Implements ``kopf_feed.FeedListener``."""

    kube: Kube
    settings: ControllerSettings
    metrics: Metrics
    cache: ResourceCache
    reconciler: Reconciler
    consumers: Consumers
    _queue: WorkQueue = field(init=False)
    _scopes: dict[str | None, _WatchScope] = field(init=False)

    def __post_init__(self) -> None:
        self._queue = WorkQueue(self.settings.backoff)
        self._scopes = {namespace: _WatchScope(namespace) for namespace in self.settings.namespaces or (None,)}

    async def run(self) -> None:
        self.metrics.leader.set(1)
        self.metrics.queue.set_function(self._queue.waiting)
        self.cache.on_change = self._key_changed
        try:
            async with asyncio.TaskGroup() as tasks:
                # One feed for each kind of pod: a kopf process has one label selector per resource.
                for kinds in (RELAY_KINDS, CONSUMER_KINDS):
                    tasks.create_task(self._run_feed(kinds))
                for scope in self._scopes.values():
                    tasks.create_task(self._keep_synced(scope))
                for _ in range(self.settings.workers):
                    tasks.create_task(self._work())
        finally:
            self.metrics.leader.set(0)
            self.metrics.queue.set_function(lambda: 0)

    # ---- events of the feed ----------------------------------------------------------------------------------------

    def watch_opened(self, kind: Kind, namespace: str | None) -> None:
        scope = self._scopes[namespace]
        scope.outdated.add(kind)
        scope.wake.set()

    def request_done(self, verb: str, kind: Kind, namespace: str | None, code: str) -> None:
        self.metrics.on_request(verb, kind.plural, code)
        scope = self._scopes[namespace]
        if code == "200":
            scope.unreadable.pop(kind, None)
        elif scope.unreadable.get(kind) != code:
            scope.unreadable[kind] = code
            extra = {"namespace": scope.name, "error": f"{verb} {kind.plural}: {code}"}
            log.warning("Watch failed, retrying; relays of an unreadable namespace wait", extra=extra)

    def _key_changed(self, key: Key) -> None:
        """Queue a relay. If its scope is not synced yet, the initial reconcile covers the change."""
        if any(not scope.unlisted for scope in self._scopes.values() if scope.has(key[0])):
            self._queue.add(key)

    # ---- tasks -----------------------------------------------------------------------------------------------------

    async def _run_feed(self, kinds: tuple[Kind, ...]) -> None:
        """Run kopf, and restart it with back-off if it ends. The lists of the next run find all missed events."""
        for attempt in itertools.count():
            try:
                await self._until_served()
                await KopfFeed(self.kube, self.settings.namespaces, kinds, self.cache, self).run()
            except Exception as error:
                delay = self.settings.backoff.delay(attempt)
                extra = {"error": str(error) or repr(error), "seconds": round(delay, 1)}
                log.warning("Watch feed ended, restarting", extra=extra)
                await asyncio.sleep(delay)

    async def _until_served(self) -> None:
        """Wait until discovery contains the custom resources: kopf runs discovery only once."""
        for attempt in itertools.count():
            if await self.kube.is_served(RELAY) and await self.kube.is_served(SUBSCRIPTION):
                return
            await asyncio.sleep(self.settings.backoff.delay(attempt))

    async def _keep_synced(self, scope: _WatchScope) -> None:
        """List outdated kinds, and all kinds periodically. Queue every relay after the first complete list."""
        while True:
            try:
                async with asyncio.timeout(self.settings.compare_interval):
                    await scope.wake.wait()
                scope.wake.clear()
            except TimeoutError:
                scope.outdated = set(WATCHED) - scope.unlisted
                self._queue_all(scope)
            while scope.outdated:
                kind = scope.outdated.pop()
                await self._list(kind, scope)
                if scope.unlisted == {kind}:
                    scope.unlisted.clear()
                    log.info("Initial list complete", extra={"namespace": scope.name, "relays": self._queue_all(scope)})
                scope.unlisted.discard(kind)

    def _queue_all(self, scope: _WatchScope) -> int:
        keys = [key for key in self.cache.all_keys() if scope.has(key[0])]
        for key in keys:
            self._key_changed(key)
        return len(keys)

    async def _list(self, kind: Kind, scope: _WatchScope) -> None:
        """List until it succeeds, with back-off, and compare with the cache."""
        for attempt in itertools.count():
            try:
                listed = await self.kube.list(kind, scope.namespace, kind.selector)
                self.cache.apply_list(kind, listed, scope.namespace)
                return
            except KubeError as error:
                delay = max(self.settings.backoff.delay(attempt), error.retry_after or 0.0)
                extra = {"namespace": scope.name, "error": str(error), "seconds": round(delay, 1)}
                log.warning("List failed, retrying; relays of the namespace wait", extra=extra)
                await asyncio.sleep(delay)

    async def _work(self) -> None:
        while True:
            key = await self._queue.next()
            started = time.perf_counter()
            try:
                requeue_after = await (self.consumers if is_consumer(key) else self.reconciler).reconcile(key)
            except KubeError as error:
                self._requeue(key, error)
            except Exception:
                # A bug that affects one relay must not stop the reconciles of the others.
                log.exception("Reconcile failed, requeued", extra={"relay": "/".join(key)})
                self.metrics.reconciles.labels("failed").inc()
                self._queue.failed(key)
            else:
                self.metrics.reconciles.labels("done").inc()
                self._queue.succeeded(key, None if requeue_after is None else requeue_after * random.uniform(0.9, 1.1))
            self.metrics.reconcile_seconds.observe(time.perf_counter() - started)

    def _requeue(self, key: Key, error: KubeError) -> None:
        delay = self._queue.failed(key, error.retry_after)
        expected = isinstance(error, Conflict | DeletionPending)
        self.metrics.reconciles.labels("conflict" if expected else "unavailable").inc()
        level = logging.INFO if expected else logging.WARNING
        extra = {"relay": "/".join(key), "error": str(error), "seconds": round(delay, 1)}
        log.log(level, "Reconcile not finished, requeued", extra=extra)
