"""The relay's HTTP server: a page at /, /livez, /readyz, /status, /metrics, PUT /assignment and PUT /config.

Meaning of the probes, on which restarts and rollouts depend:

- ``/livez`` fails only if a relay's own loop is stalled. An unavailable sink or database is no reason to restart: a
  restart would not help and would discard state.
- ``/readyz`` fails until there is a configuration and every relay was connected once, and during shutdown. It does not
  fail if a sink or database becomes unavailable later: no traffic is routed to a relay, and a broker outage must not
  block a rollout.

The port is reachable for the whole cluster, so connections, headers, bodies and their durations are bounded.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from mailboat.errors import ConfigError, DatabaseUnavailable, MailboatError
from mailboat.http.assignment import LARGEST, Assign, apply_assignment, parse
from mailboat.http.auth import CallerAuth
from mailboat.http.metrics import Metrics, StatusCollector
from mailboat.http.status_page import SECURITY_HEADERS, render_page
from mailboat.runtime.config_source import OlderConfig
from mailboat.runtime.relay_status import RelayState, RelayStatus, as_json
from mailboat_spec.listener import listen
from mailboat_spec.relay_status import ConfigReport

log = logging.getLogger(__name__)

Configure = Callable[[bytes], Awaitable[int | None]]
"""Apply a configuration and return its version. Raises ``ConfigError``, or ``OlderConfig`` if a newer one is in use."""

_CLOSE_WITHIN = 2.0
"""Seconds for running responses to finish when the server stops."""
_CONNECTIONS = 64
"""Maximum open connections; probes, scrapes and the operator need a handful."""
_KEPT_OPEN = 75
"""Seconds for which a connection without a request stays open. Headers must arrive within that time."""
_LINGER = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client receives the response."""


@dataclass(frozen=True, slots=True)
class StatusExtras:
    """Content of ``/status`` besides the relays."""

    config: ConfigReport = field(default_factory=ConfigReport)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Version in use, by secret."""


class HttpApi:
    """The endpoints, without a socket."""

    def __init__(
        self,
        statuses: Callable[[], Sequence[RelayStatus]],
        assign: Assign,
        callers: CallerAuth | None = None,
        *,
        stopping: Callable[[], bool] = lambda: False,
        extras: Callable[[], StatusExtras] = StatusExtras,
        configure: Configure | None = None,
    ) -> None:
        """``configure`` applies a pushed configuration. If it is None, calls can't change the configuration."""
        self._statuses = statuses
        self._assign = assign
        self._callers = callers or CallerAuth()
        self._stopping = stopping
        self._extras = extras
        self._configure = configure
        self._metrics = Metrics(StatusCollector(statuses))

    def application(self) -> web.Application:
        application = web.Application(client_max_size=LARGEST)
        application.router.add_get("/", self._page)
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/status", self._status)
        application.router.add_get("/metrics", self._render_metrics)
        application.router.add_put("/assignment", self._assignment)
        application.router.add_put("/config", self._config)
        return application

    async def _page(self, _: web.Request) -> web.Response:
        text = render_page(self._statuses(), self._extras().config.error)
        return web.Response(text=text, content_type="text/html", charset="utf-8", headers=SECURITY_HEADERS)

    async def _livez(self, _: web.Request) -> web.Response:
        stalled = [status.name for status in self._statuses() if status.stalled]
        if stalled:
            return _text(f"stalled: {', '.join(stalled)}", 503)
        return _text("ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        statuses = self._statuses()
        if self._stopping() or any(status.state is RelayState.STOPPING for status in statuses):
            return _text("stopping", 503)
        if not statuses:
            return _text(f"no configuration yet: {self._extras().config.error or 'waiting for it'}", 503)
        waiting = [status for status in statuses if not status.was_connected]
        if waiting:
            lines = (f"{status.name}: {status.state}: {status.message or 'not connected yet'}" for status in waiting)
            return _text("\n".join(lines), 503)
        return _text("ok")

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response({"relays": as_json(list(self._statuses())), **as_json(self._extras())})

    async def _render_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _assignment(self, request: web.Request) -> web.Response:
        body = await self._callers.body_of(request)
        try:
            assignment = parse(body, "the request's body")
            outcome = await apply_assignment(assignment, self._assign)
        except ConfigError as error:
            return _text(str(error), 400)
        except DatabaseUnavailable as error:
            return _text(f"The assignment can't be written down: {error}", 503)
        except MailboatError as error:
            return _text(str(error), 500)
        document = {"generation": assignment.generation, **outcome}
        log.info("Assignment received", extra=document)
        return web.json_response(document, status=409 if outcome["stale"] else 404 if outcome["unknown"] else 200)

    async def _config(self, request: web.Request) -> web.Response:
        body = await self._callers.body_of(request)
        if self._configure is None:
            return _text("Configurations are not taken here: start the relay with --follow.", 403)
        try:
            version = await self._configure(body)
        except OlderConfig as error:
            return _text(str(error), 409)
        except ConfigError as error:
            return _text(str(error), 400)
        return web.json_response({"version": version})


def _text(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text + "\n", status=status)


class HttpServer:
    """Endpoints on a socket. The socket is bound first, so that the relay has its address before it starts."""

    def __init__(self, listening: socket.socket, host: str = "") -> None:
        """``host``: name or IP address by which others reach a wildcard address. Default: the host name."""
        self._socket = listening
        self._host = host
        self._runner: web.AppRunner | None = None

    @classmethod
    def bind(cls, host: str, port: int, advertised: str = "") -> HttpServer:
        """Bind the address. The wildcard ``::`` includes IPv4, and means IPv4 alone if there is no IPv6.

        Raises ``ConfigError`` if the address can't be bound.
        """
        try:
            return cls(listen(host, port, most=_CONNECTIONS), advertised)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host}:{port}: {error.strerror or error}. Choose another address with --listen"
                " (port 0 takes any that is free)."
            ) from error

    @property
    def address(self) -> str:
        """``http://host:port`` with the actual port. For a wildcard address the host is the advertised one."""
        host, port, *_ = self._socket.getsockname()
        if host in ("0.0.0.0", "::"):
            host = self._host or socket.gethostname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, application: web.Application) -> None:
        # No access log: probes and scrapes arrive every few seconds.
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_CLOSE_WITHIN,
            keepalive_timeout=_KEPT_OPEN,
            lingering_time=_LINGER,
            auto_decompress=False,  # bodies are decompressed with a bound, after authentication
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def close(self) -> None:
        """Close the server. Safe to call twice, and before ``start``."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``host:port``, ``:port`` or ``[v6]:port``. Raises ``ConfigError``."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{json.dumps(text)} is no address to listen on: write host:port, like 127.0.0.1:8080 or :0.")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
