"""kopf's part: it watches the two kinds of resources and tells us of every event. The only module that imports kopf.

Event handlers only. Every other kind of handler would put finalizers or annotations on people's resources, and a
namespace could not be deleted while the operator is away. Peering is off, since a Lease decides who leads, and so is
scanning for kinds and namespaces, since both are known.

kopf has a thread and an event loop of its own: it takes over signal handlers and cancels every task that began after
it, neither of which it may do to ours. What it can't tell is what was deleted while it had lost the thread: it lists
anew then, and what is not in the list is not mentioned. Objects of a list come without a type, so that the operator
notices, lists as well, and compares.

Its sessions are made and closed by us (``connections``). Left to itself it may log in once more after it has closed
what it had, when it is told to stop in the middle of its start, and nobody closes that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import kopf

from mailboat_operator.connections import Connections
from mailboat_operator.kube import RELAY, SUBSCRIPTION, Access, Kind, Object
from mailboat_spec.names import GROUP, RELAY_PLURAL, SUBSCRIPTION_PLURAL, VERSION

log = logging.getLogger(__name__)

OnEvent = Callable[[str | None, Kind, Object], None]
"""Type (ADDED, MODIFIED, DELETED, or None for an object in a list), kind, object. Called in our own event loop."""

_STOP_WITHIN: Final = 2.0
"""Seconds. It only ever reads, so nobody has to wait until it is gone; it is a courtesy to what comes after."""

_LOGIN_EVERY: Final = 1.0
"""Seconds, at least: a server that lets nobody in is not to be asked without a pause."""

_RUNNING_LOG: Final = logging.getLogger("kopf._core.reactor.running")


def _not_about_signals(record: logging.LogRecord) -> bool:
    """That it has no hand in signals, beside the main thread, is what we want: nothing to warn of at every start."""
    return "OS signals are ignored" not in record.msg


class ForEver:
    """Pauses between attempts, without an end: the API server will come back, however long it takes."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1.0, 2.0)
        while True:
            yield 5.0


class KopfFeed:
    """Runs kopf and passes on what it sees."""

    def __init__(
        self, access: Callable[[], Coroutine[Any, Any, Access]], namespaces: Sequence[str], on_event: OnEvent
    ) -> None:
        self._access = access
        self._namespaces = tuple(namespaces)
        self._on_event = on_event
        self._stop = threading.Event()
        self._connections = Connections()
        """Only kopf's thread touches them."""
        self._logins = 0

    async def run(self) -> None:
        """Until cancelled. Raises if kopf gives up, which it should not."""
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
            # Asked anew whenever the server wants to know who we are: a pod's token lives for an hour.
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
    settings.posting.enabled = False  # our events are our own
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
    """kopf's objects are views on dicts; a list's items don't say what they are."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **dict(found)}
