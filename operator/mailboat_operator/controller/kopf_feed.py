"""kopf integration: watch every kind that the controller needs, and forward the events. The only module with kopf.

Only event handlers are used. Every other kind of handler puts finalizers or annotations on user resources, and then a
namespace could not be deleted while the operator is down. Peering is off, because a Lease elects the leader; scanning
for kinds and namespaces, because both are known. kopf replaces signal handlers and cancels every task that started
after it, so it runs in its own thread with its own event loop.

Life of one watch, per kind and namespace:

    list -> watch -> watch -> ...     a watch that ended resumes from the last version; no event is lost
      ^                  |
      +--- 410 Gone -----+            the version is too old: kopf lists again

kopf retries failed requests itself (connection refused, 403, 429 with Retry-After, 5xx), for any length of time. It
does not report deletions that happened before a list: the list only contains existing objects. So the feed traces
kopf's requests, and reports when a watch is open after a list (``watch_opened``). A list that the controller makes from
then on finds the earlier deletions, and the watch reports the later ones.

The operator creates and closes kopf's sessions. If kopf is stopped during its start, it may log in
again after it closed its sessions, and that session would leak.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Final, Protocol

import aiohttp
import kopf
from yarl import URL

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.kube.client import ClosableConnections, Kind, Kube

_STOP_WITHIN: Final = 2.0
"""Seconds to wait for kopf's thread at shutdown. Best effort: kopf only reads, so a late exit does no harm."""
_LOGIN_EVERY: Final = 1.0
"""Minimum seconds between logins, so that a server that rejects them is not flooded with requests."""
_REQUEST_EVERY: Final = 0.1
"""Minimum seconds between two requests of one watch: a server may end it at once, repeatedly."""
_REPLACED_LOGS: Final = ("kopf._cogs.clients.api", "kopf._core.reactor.running")
"""Loggers of kopf whose errors are expected: failed requests are reported by ``request_done``, and signals are ignored
outside the main thread on purpose."""


class FeedListener(Protocol):
    """Listener for the requests of kopf. All methods are called in the operator's event loop."""

    def watch_opened(self, kind: Kind, namespace: str | None) -> None:
        """A list of this kind is complete, and a watch continues from its version."""

    def request_done(self, verb: str, kind: Kind, namespace: str | None, code: str) -> None:
        """A request of kopf was answered with this status code; ``error``: there was no answer."""


class _EndlessBackoff:
    """Pauses between attempts. They never end: the API server may be unavailable for any length of time."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1.0, 2.0)
        while True:
            yield 5.0


class KopfFeed:
    """One run of kopf. It opens one watch per resource, so no two kinds may have the same."""

    def __init__(
        self,
        kube: Kube,
        namespaces: tuple[str, ...],
        kinds: Sequence[Kind],
        cache: ResourceCache,
        listener: FeedListener,
    ) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._kinds = kinds
        self._cache = cache
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        # The attributes below are used by kopf's thread only.
        self._connections = ClosableConnections()
        self._logins = 0
        self._paths = {
            kind.path(namespace): (kind, namespace) for kind in kinds for namespace in (self._namespaces or (None,))
        }
        self._listed: set[str] = set()
        """Paths that were listed since their last watch was opened."""
        self._requested: dict[str, float] = {}
        """Time of the last request, by path."""

    async def run(self) -> None:
        """Run until cancelled. Raise if kopf ends by itself, which it should not."""
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # so that the thread can end after a cancellation, too

        def work() -> None:
            try:
                asyncio.run(self._operator())
                raise RuntimeError("kopf ended by itself")
            except BaseException as error:
                ended.set_exception(error)

        for name in _REPLACED_LOGS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        thread = threading.Thread(target=work, name="kopf", daemon=True)
        thread.start()
        try:
            await asyncio.wrap_future(ended)
        finally:
            self._stop.set()
            await asyncio.shield(asyncio.to_thread(thread.join, _STOP_WITHIN))

    def _call(self, receive: Callable[..., object], *arguments: object) -> None:
        """Call a function in the operator's event loop, from kopf's thread, unless the feed was stopped."""
        if not self._stop.is_set():
            self._loop.call_soon_threadsafe(receive, *arguments)

    async def _operator(self) -> None:
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=self._settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
            )
        finally:
            await self._connections.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            # Called whenever the server requires a login: a pod's token expires after an hour.
            if self._logins:
                await asyncio.sleep(_LOGIN_EVERY)
            self._logins += 1
            api = self._kube.configuration
            credentials = kopf.ConnectionInfo(
                server=api.host,
                ca_path=api.ssl_ca_cert,
                certificate_path=api.cert_file,
                private_key_path=api.key_file,
                token=await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._kube.token(), self._loop)),
                insecure=not api.verify_ssl,
            )
            session = aiohttp.ClientSession(
                connector=self._connections.connector(credentials.as_ssl_context()),
                headers=credentials.as_http_headers(),
                trace_configs=[self._trace(URL(credentials.server).path)],
                trust_env=False,
            )
            return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)

        for kind in self._kinds:
            kopf.on.event(kind.api_version, kind.plural, registry=registry)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Any:
        async def handle(event: Any, **_: Any) -> None:
            receive = self._cache.remove if event["type"] == "DELETED" else self._cache.store
            # kopf passes views on dicts, and listed items lack apiVersion and kind.
            self._call(receive, kind, {"apiVersion": kind.api_version, "kind": kind.name, **dict(event["object"])})

        handle.__name__ = kind.plural
        return handle

    def _trace(self, root: str) -> aiohttp.TraceConfig:
        """Observe the requests of kopf to the API server, whose address may have a path: ``root``."""
        trace, prefix = aiohttp.TraceConfig(), root.rstrip("/")

        async def start(_: Any, __: SimpleNamespace, request: aiohttp.TraceRequestStartParams) -> None:
            path = request.url.path.removeprefix(prefix)
            if path in self._paths:
                pause = self._requested.get(path, 0.0) + _REQUEST_EVERY - time.monotonic()
                self._requested[path] = time.monotonic() + max(pause, 0.0)
                await asyncio.sleep(max(pause, 0.0))

        async def end(_: Any, __: SimpleNamespace, request: aiohttp.TraceRequestEndParams) -> None:
            self._done(request.url, prefix, str(request.response.status))

        async def fail(_: Any, __: SimpleNamespace, request: aiohttp.TraceRequestExceptionParams) -> None:
            self._done(request.url, prefix, "error")

        trace.on_request_start.append(start)
        trace.on_request_end.append(end)
        trace.on_request_exception.append(fail)
        return trace

    def _done(self, url: URL, prefix: str, code: str) -> None:
        path = url.path.removeprefix(prefix)
        if path not in self._paths:
            return
        kind, namespace = self._paths[path]
        verb = "watch" if "watch" in url.query else "list"
        self._call(self._listener.request_done, verb, kind, namespace, code)
        if code == "200" and verb == "list":
            self._listed.add(path)
        elif code == "200" and path in self._listed:
            self._listed.discard(path)
            self._call(self._listener.watch_opened, kind, namespace)

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False  # the operator writes its own Kubernetes events
        settings.scanning.disabled = True
        settings.peering.standalone = True
        settings.networking.error_backoffs = _EndlessBackoff()
        settings.networking.request_timeout = 30.0
        settings.networking.connect_timeout = 5.0
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.watching.inactivity_timeout = 330
        settings.watching.chunk_size = 500
        settings.queueing.exit_timeout = 0.5
        for kind in self._kinds:
            if kind.selector:
                settings.watching.label_selectors[kind.api_version, kind.plural] = kind.selector
        return settings
