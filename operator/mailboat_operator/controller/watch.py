"""Keep one kind of object in the cache up to date: list once, then watch; list again if the watch expired.

Errors of the API server are expected. Each is retried with growing back-off. No event is lost meanwhile, since a watch
resumes from the last version it received.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.workqueue import Backoff
from mailboat_operator.kube.client import Gone, Kind, Kube, KubeError

log = logging.getLogger(__name__)

_PAUSE: Final = 0.1
"""Seconds before a watch that the server ended is reopened: the server may end it at once, repeatedly."""


class Watcher:
    """Watch of one kind, in one namespace or in all, with one selector."""

    def __init__(
        self,
        kube: Kube,
        cache: ResourceCache,
        kind: Kind,
        namespace: str | None,
        selector: str,
        on_listed: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._kind = kind
        self._namespace = namespace
        self._selector = selector
        self._on_listed = on_listed
        self._backoff = backoff or Backoff(initial=0.2, longest=10.0)
        self.synced = asyncio.Event()
        """Set once the first list is in the cache."""

    async def run(self) -> None:
        """Run until cancelled."""
        version: str | None = None
        failures = 0
        while True:
            try:
                if version is None:
                    version = await self._list()
                async for change in self._kube.watch(self._kind, self._namespace, self._selector, version):
                    failures = 0
                    version = change.resource_version
                    if change.type == "DELETED":
                        self._cache.lost(self._kind, change.object)
                    elif change.type in ("ADDED", "MODIFIED"):
                        self._cache.saw(self._kind, change.object)
                await asyncio.sleep(_PAUSE)
            except KubeError as error:
                if isinstance(error, Gone):
                    version = None
                delay = error.retry_after or self._backoff.delay(failures)
                failures += 1
                extra = {"kind": self._kind.name, "namespace": self._namespace or "all", "error": str(error)}
                log.log(
                    logging.WARNING if failures > 1 else logging.INFO,
                    "The watch will be taken up again.",
                    extra={**extra, "seconds": round(delay, 1)},
                )
                await asyncio.sleep(delay)

    async def _list(self) -> str:
        listed = await self._kube.list(self._kind, self._namespace, self._selector)
        self._cache.listed(self._kind, listed, self._namespace)
        if self.synced.is_set():
            self._on_listed()
        self.synced.set()
        return listed.resource_version
