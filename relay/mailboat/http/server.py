"""The HTTP server of a relay: a page at /, /livez, /readyz, /status, /metrics, PUT /assignment and PUT /config.

A consumer process serves /livez, /readyz, /status and /metrics.

Meaning of the probes, on which restarts and rollouts depend:

- ``/livez`` fails only if a relay's own loop is stalled. An unavailable sink or database is no reason to restart: a
  restart would not help and would discard state.
- ``/readyz`` fails until there is a configuration and every relay was connected once, and during shutdown. It does not
  fail if a sink or database becomes unavailable later: no traffic is routed to a relay, and a broker outage must not
  block a rollout.

The port is reachable for the whole cluster, so connections, headers, bodies and their durations are bounded.

The body of ``PUT /assignment``, whose generations increase, so that a delayed request can't revert a newer assignment:

    {"generation": 7, "subscriptions": {"shop/orders-to-kafka": {"0": "relay-a", "1": "relay-b"}}}
"""

import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from prometheus_client.registry import Collector
from pydantic import ValidationError

from mailboat.errors import ConfigError, DatabaseUnavailable, MailboatError
from mailboat.http.auth import CallerAuth
from mailboat.http.metrics import StatusCollector, metrics_handler
from mailboat.http.status_page import SECURITY_HEADERS, render_page
from mailboat.runtime.config_source import OlderConfig
from mailboat.runtime.relay_status import ProcessStatus, RelayState
from mailboat_spec.assignment import AssignmentRequest
from mailboat_spec.consumer_report import ConsumerReport, ConsumerReports
from mailboat_spec.listener import listen
from mailboat_spec.relay_status import as_json
from mailboat_spec.wire_format import unpack

log = logging.getLogger(__name__)

LARGEST: Final = 1024 * 1024
"""Maximum bytes of a body: an assignment of 20,000 partitions, or of 100,000 if compressed."""

Assign = Callable[[str, int, dict[int, str]], Awaitable[bool]]
"""Apply the assignment of one subscription: name, generation, owners by partition. Returns False if a newer generation
is in use. Raises ``LookupError`` for a subscription that this relay does not serve."""
Configure = Callable[[bytes], Awaitable[int | None]]
"""Apply a configuration and return its version. Raises ``ConfigError``, or ``OlderConfig`` if a newer one is in use."""

_CONNECTIONS = 64
"""Maximum open connections; probes, scrapes and the operator need a handful."""


@dataclass(eq=False)
class HttpApi:
    status: Callable[[], ProcessStatus]
    assign: Assign
    callers: CallerAuth = field(default_factory=CallerAuth)
    stopping: Callable[[], bool] = bool
    configure: Configure | None = None
    """Applies a pushed configuration. If it is None, calls can't change the configuration."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
            web.get("/status", self._status),
            web.get("/metrics", metrics_handler(StatusCollector(lambda: self.status().relays))),
            web.put("/assignment", self._assignment),
            web.put("/config", self._config),
        ]

    async def _page(self, _: web.Request) -> web.Response:
        text = render_page(self.status())
        return web.Response(text=text, content_type="text/html", charset="utf-8", headers=SECURITY_HEADERS)

    async def _livez(self, _: web.Request) -> web.Response:
        if stalled := [relay.name for relay in self.status().relays if relay.stalled]:
            return _text(f"stalled: {', '.join(stalled)}", 503)
        return _text("ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        status = self.status()
        if self.stopping() or any(relay.state is RelayState.STOPPING for relay in status.relays):
            return _text("stopping", 503)
        if not status.relays:
            return _text(f"no configuration yet: {status.config.error or 'waiting for it'}", 503)
        if waiting := [relay for relay in status.relays if not relay.was_connected]:
            lines = (f"{relay.name}: {relay.state}: {relay.message or 'not connected yet'}" for relay in waiting)
            return _text("\n".join(lines), 503)
        return _text("ok")

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(as_json(self.status()))

    async def _assignment(self, request: web.Request) -> web.Response:
        """Apply the assignment of each subscription. A refused one does not affect the others."""
        body = await self.callers.body_of(request)
        outcome: dict[str, list[str]] = {"accepted": [], "stale": [], "unknown": []}
        try:
            assignment = parse_assignment(body, "the request's body")
            for name, owners in assignment.subscriptions.items():
                try:
                    accepted = await self.assign(name, assignment.generation, dict(owners))
                except LookupError:
                    outcome["unknown"].append(name)
                else:
                    outcome["accepted" if accepted else "stale"].append(name)
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
        body = await self.callers.body_of(request)
        if self.configure is None:
            return _text("Configurations are not taken here: start the relay with --follow.", 403)
        try:
            version = await self.configure(body)
        except OlderConfig as error:
            return _text(str(error), 409)
        except ConfigError as error:
            return _text(str(error), 400)
        return web.json_response({"version": version})


def parse_assignment(content: bytes, source: str) -> AssignmentRequest:
    """Parse an assignment, compressed or not. Raises ``ConfigError`` that names the source and the field."""
    try:
        document = json.loads(unpack(content))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}.") from error
    try:
        return AssignmentRequest.model_validate(document)
    except ValidationError as error:
        problems = [
            f"{source}: {'.'.join(str(step) for step in problem['loc']) or 'the document'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)[:10]
        ]
        example = '{"generation": 1, "subscriptions": {"namespace/name": {"0": "relay-id"}}}'
        raise ConfigError("\n".join([*problems, f"An assignment looks like {example}."])) from error


@dataclass(eq=False)
class ConsumerHttpApi:
    status: Callable[[], ConsumerReport]
    samples: Collector
    _connected_once: bool = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
            web.get("/status", self._render_status),
            web.get("/metrics", metrics_handler(self.samples)),
        ]

    async def _livez(self, _: web.Request) -> web.Response:
        """Return ok: a response proves that the event loop runs."""
        return _text("ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        status = self.status()
        self._connected_once = self._connected_once or status.state == "Running"
        if status.state == "Stopping" or not self._connected_once:
            return _text(f"{status.state}: {status.message or 'not connected yet'}", 503)
        return _text("ok")

    async def _render_status(self, _: web.Request) -> web.Response:
        document = ConsumerReports(consumers=(self.status(),))
        return web.Response(text=document.model_dump_json(), content_type="application/json")


def _text(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text + "\n", status=status)


class HttpServer:
    """Endpoints on a socket. The socket is bound first, so that the relay has its address before it starts."""

    def __init__(self, host: str, port: int, advertised: str = "") -> None:
        """Bind the address or raise ``ConfigError``. ``::`` includes IPv4, and means IPv4 alone without IPv6.

        ``advertised``: name or IP address by which others reach a wildcard address. Default: the host name.
        """
        self._advertised = advertised
        self._runner: web.AppRunner | None = None
        try:
            self._socket = listen(host, port, most=_CONNECTIONS)
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
            host = self._advertised or socket.gethostname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, routes: Iterable[web.RouteDef]) -> None:
        application = web.Application(client_max_size=LARGEST)
        application.add_routes(routes)
        self._runner = web.AppRunner(
            application,
            access_log=None,  # probes and scrapes arrive every few seconds
            handle_signals=False,
            shutdown_timeout=2.0,  # seconds for running responses to finish
            keepalive_timeout=75,  # seconds, also for the headers of a request to arrive
            lingering_time=2.0,  # seconds to drop the rest of a refused body, so that the client receives the response
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
