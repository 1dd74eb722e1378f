"""kopf integration: watch the two custom resources and forward every event. The only module that imports kopf.

Only event handlers are used. Every other kind of handler puts finalizers or annotations on user resources, and then a
namespace could not be deleted while the operator is down. Peering is off, because a Lease elects the leader. Scanning
for kinds and namespaces is off, because both are known.

kopf runs in its own thread with its own event loop. It replaces signal handlers and cancels every task that started
after it; neither may happen in the operator's loop. kopf does not report deletions that happened while its watch was
down: after a re-list it only emits existing objects, with event type None. On such an event the operator lists as well
and compares.

The operator creates and closes kopf's sessions (``connections``). If kopf is stopped during its start, it may log in
again after it closed its sessions, and that session would leak.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import kopf

from mailboat_operator.kube.client import RELAY, SUBSCRIPTION, Access, Kind, Object
from mailboat_operator.kube.http import ClosableConnections
from mailboat_spec.names import GROUP, RELAY_PLURAL, SUBSCRIPTION_PLURAL, VERSION

log = logging.getLogger(__name__)

OnEvent = Callable[[str | None, Kind, Object], None]
"""Type (ADDED, MODIFIED, DELETED, or None for a listed object), kind, object. Called in the operator's event loop."""

_STOP_WITHIN: Final = 2.0
"""Seconds to wait for kopf's thread at shutdown. Best effort: kopf only reads, so a late exit does no harm."""

_LOGIN_EVERY: Final = 1.0
"""Minimum seconds between logins, so that a server that rejects them is not flooded with requests."""

_RUNNING_LOG: Final = logging.getLogger("kopf._core.reactor.running")


def _not_about_signals(record: logging.LogRecord) -> bool:
    """Drop kopf's warning about ignored signals at every start: outside the main thread this is intended."""
    return "OS signals are ignored" not in record.msg


class ForEver:
    """Endless pauses between attempts: the API server may be unavailable for any length of time."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1.0, 2.0)
        while True:
            yield 5.0


class KopfFeed:
    """Run kopf and forward its events."""

    def __init__(
        self, access: Callable[[], Coroutine[Any, Any, Access]], namespaces: Sequence[str], on_event: OnEvent
    ) -> None:
        self._access = access
        self._namespaces = tuple(namespaces)
        self._on_event = on_event
        self._stop = threading.Event()
        self._connections = ClosableConnections()
        """Used by kopf's thread only."""
        self._logins = 0

    async def run(self) -> None:
        """Run until cancelled. Raise if kopf ends by itself, which it should not."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            try:
                asyncio.run(self._operator(loop))
                outcome: BaseException = RuntimeError("kopf ended by itself")
            except BaseException as error:
                outcome = error
            if not self._stop.is_set():
                loop.call_soon_threadsafe(_fail, ended, outcome)

        _RUNNING_LOG.addFilter(_not_about_signals)
        thread = threading.Thread(target=work, name="kopf", daemon=True)
        thread.start()
        try:
            await ended
        finally:
            self._stop.set()
            await asyncio.shield(asyncio.to_thread(thread.join, _STOP_WITHIN))

    async def _operator(self, ours: asyncio.AbstractEventLoop) -> None:
        try:
            await kopf.operator(
                registry=self._registry(ours),
                settings=_settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
            )
        finally:
            await self._connections.close()

    def _registry(self, ours: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def tell(kind: Kind, event: Any) -> None:
            if not self._stop.is_set():
                ours.call_soon_threadsafe(self._on_event, event["type"], kind, _plain(kind, event["object"]))

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            # Called whenever the server requires a login: a pod's token expires after an hour.
            if self._logins:
                await asyncio.sleep(_LOGIN_EVERY)
            self._logins += 1
            access = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._access(), ours))
            let_in = _let_in(access)
            session = self._connections.session(let_in.as_ssl_context(), let_in.as_http_headers())
            return kopf.AiohttpSession(server=access.server, aiohttp_session=session)

        @kopf.on.event(GROUP, VERSION, RELAY_PLURAL, registry=registry)
        async def relay(event: Any, **_: Any) -> None:
            tell(RELAY, event)

        @kopf.on.event(GROUP, VERSION, SUBSCRIPTION_PLURAL, registry=registry)
        async def subscription(event: Any, **_: Any) -> None:
            tell(SUBSCRIPTION, event)

        return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # the operator writes its own Kubernetes events
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.error_backoffs = ForEver()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.inactivity_timeout = 330
    settings.queueing.exit_timeout = 0.5
    return settings


def _let_in(access: Access) -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(
        server=access.server,
        ca_path=access.ca_path,
        insecure=not access.verify,
        token=access.token,
        certificate_path=access.certificate_path,
        private_key_path=access.key_path,
    )


def _fail(ended: asyncio.Future[None], outcome: BaseException) -> None:
    if not ended.done():
        ended.set_exception(outcome)


def _plain(kind: Kind, found: Any) -> Object:
    """Return a plain dict: kopf passes views on dicts, and listed items lack apiVersion and kind."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **dict(found)}
