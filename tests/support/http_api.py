"""A relay's HTTP server on a real socket, with a status that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from mailboat.http.auth import CallerAuth
from mailboat.http.server import HttpApi, HttpServer
from mailboat.runtime.relay_status import ProcessStatus, RelayStatus
from support.cli import Operator

OPERATOR = Operator("shop/relay-0")


@dataclass
class Relays:
    """The relays behind the HTTP server, controlled by the test."""

    statuses: list[RelayStatus] = field(default_factory=list)
    stopping: bool = False
    generations: dict[str, int] = field(default_factory=dict)
    assigned: list[tuple[str, int, dict[int, str]]] = field(default_factory=list)
    failure: Exception | None = None

    def status(self) -> ProcessStatus:
        return ProcessStatus(tuple(self.statuses))

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        if self.failure is not None:
            raise self.failure
        if generation <= self.generations[name]:  # KeyError, a LookupError: an unknown subscription
            return False
        self.generations[name] = generation
        self.assigned.append((name, generation, owners))
        return True


async def serving(relays: Relays, callers: CallerAuth) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client of a server with this authentication."""
    server = HttpServer("127.0.0.1", 0)
    api = HttpApi(relays.status, relays.assign, callers, stopping=lambda: relays.stopping)
    await server.start(api.routes())
    try:
        async with aiohttp.ClientSession(server.address) as session:
            yield session
    finally:
        await server.close()
