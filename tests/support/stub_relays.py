"""Stub relays for tests of the operator: the HTTP API of a relay without delivery.

All relays of one outbox share an ``Outbox`` in place of the database, so that an assignment to one of them is visible
to the others. The production code verifies tokens.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from aiohttp import web

from mailboat.http.auth import CallerAuth
from mailboat.http.jwt_auth import JwtVerifier
from mailboat.http.server import parse_assignment
from mailboat_spec.names import CONFIG_VERSION_ANNOTATION
from mailboat_spec.wire_format import unpack

PORT = 9808


class Outbox:
    """Shared state of the relays of one outbox."""

    def __init__(self) -> None:
        self.reachable = True
        self.generation = 0
        self.owners: dict[str, dict[int, str]] = {}
        self.lag: dict[str, dict[int, int]] = {}
        self.published: dict[str, int] = {}
        self.assignments = 0

    def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        if generation < self.generation:
            return False
        self.generation = generation
        self.owners[name] = owners
        return True


class RelayStandIn:
    """One relay in one pod."""

    def __init__(self, outbox: Outbox, pod: str, namespace: str, keys: Path) -> None:
        self.outbox = outbox
        self.pod = pod
        self.namespace = namespace
        self.uid = ""
        # Each pod has its own address in 127/8, so that all can use the default port.
        self.ip = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"
        self.documents: list[dict[str, Any]] = []
        self.version: int | None = None
        self.config_error: str | None = None
        self.failed: dict[str, str] = {}
        self.sink_reachable: bool | None = True
        self.silent: list[str] = []
        """Relays without heartbeats, whose partitions this relay reports."""
        self.paused: set[str] = set()
        self.configs = 0
        self.polls = 0
        self.refused: list[int] = []
        self.refuses_configs = ""
        self.offered = 0
        self._keys = keys
        self._runner: web.AppRunner | None = None

    @property
    def id(self) -> str:
        return f"{self.namespace}/{self.pod}"

    async def start(self) -> None:
        application = web.Application(client_max_size=16 * 1024 * 1024)
        application.router.add_get("/status", self._status)
        application.router.add_put("/config", self._config)
        application.router.add_put("/assignment", self._assignment)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.ip, PORT, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _body(self, request: web.Request) -> bytes:
        audience = f"{self.namespace}/{self.pod}/{self.uid}"
        try:
            return await CallerAuth(JwtVerifier(self._keys, audience)).body_of(request)
        except web.HTTPException as refusal:
            self.refused.append(refusal.status)
            raise

    async def _config(self, request: web.Request) -> web.Response:
        documents = json.loads(unpack(await self._body(request)))["items"]
        version = int(documents[0]["metadata"]["annotations"][CONFIG_VERSION_ANNOTATION])
        self.offered += 1
        if self.refuses_configs:
            self.config_error = self.refuses_configs
            return web.Response(status=400, text=self.refuses_configs)
        if self.version is not None and version < self.version:
            return web.Response(status=409, text="a newer one is known")
        self.configs += 1
        self.documents, self.version = documents, version
        return web.json_response({"version": version})

    async def _assignment(self, request: web.Request) -> web.Response:
        assignment = parse_assignment(await self._body(request), "the body")
        stale, unknown = [], []
        for name, owners in assignment.subscriptions.items():
            if name not in self.names():
                unknown.append(name)
            elif not self.outbox.assign(name, assignment.generation, dict(owners)):
                stale.append(name)
        self.outbox.assignments += 1
        code = 409 if stale else 404 if unknown else 200
        return web.json_response({"stale": stale, "unknown": unknown}, status=code)

    def names(self) -> list[str]:
        return [
            f"{document['metadata']['namespace']}/{document['metadata']['name']}"
            for document in self.documents
            if document["kind"] == "EventSubscription"
        ]

    async def _status(self, _: web.Request) -> web.Response:
        self.polls += 1
        relay = next((each for each in self.documents if each["kind"] == "OutboxRelay"), None)
        relays = [] if relay is None else [self._relay(relay)]
        document = {"relays": relays, "config": {"version": self.version, "error": self.config_error}, "secrets": {}}
        return web.Response(text=json.dumps(document), content_type="application/json")

    def _relay(self, relay: dict[str, Any]) -> dict[str, Any]:
        subscriptions = [each for each in self.documents if each["kind"] == "EventSubscription"]
        return {
            "name": f"{relay['metadata']['namespace']}/{relay['metadata']['name']}",
            "relay": self.id,
            "state": "Running" if self.outbox.reachable else "Connecting",
            "message": "" if self.outbox.reachable else "the database can't be reached: connection refused",
            "databaseReachable": self.outbox.reachable,
            "schemaReady": self.outbox.reachable,
            "outbox": "mailboat.outbox",
            "partitionsAheadDays": 29.5,
            "retentionBlocked": None,
            "peers": [],
            "silent": self.silent,
            "stalled": False,
            "subscriptions": [self._subscription(each) for each in subscriptions] if self.outbox.reachable else [],
        }

    def _subscription(self, document: dict[str, Any]) -> dict[str, Any]:
        name = f"{document['metadata']['namespace']}/{document['metadata']['name']}"
        owners = self.outbox.owners.get(name, {})
        count = document["spec"].get("partitions", 8)
        lags = self.outbox.lag.get(name, {})
        owned = [number for number in range(count) if owners.get(number) == self.id]
        orphans = [number for number in range(count) if owners.get(number) in self.silent]
        paused = name in self.paused or document["spec"].get("state") == "Paused"
        return {
            "name": name,
            "sink": next(iter(document["spec"]["sink"])),
            "state": "Failed" if name in self.failed else "Paused" if paused else "Running",
            "partitions": count,
            "lag": sum(lags.get(number, 0) for number in owned),
            "lagBounded": any(lags.get(number, 0) >= 100_000 for number in owned),
            "oldestAge": None,
            "parked": 0,
            "dead": 0,
            "published": self.outbox.published.get(name, 0) if owned else 0,
            "refused": 0,
            "rate": 0.0,
            "sinkReachable": self.sink_reachable,
            "lastError": self.failed.get(name)
            or ("broker: connection refused" if self.sink_reachable is False else None),
            "owned": [_partition(number, lags.get(number, 0)) for number in owned],
            "orphans": [_partition(number, lags.get(number, 0)) for number in orphans],
            "owners": {str(number): owners.get(number) for number in range(count)},
        }


def _partition(number: int, lag: int) -> dict[str, Any]:
    return {
        "partition": number,
        "lag": lag,
        "lagBounded": lag >= 100_000,
        "oldestAge": 90.0 if lag else None,
        "parked": 0,
        "published": 0,
        "lastError": None,
    }
