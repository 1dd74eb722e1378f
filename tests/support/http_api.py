"""A relay's HTTP side on a real socket, with a status that the test may change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from mailboat.http.auth import CallerAuth
from mailboat.http.server import HttpApi, HttpServer
from mailboat.runtime.relay_status import RelayStatus
from support.cli import Operator

OPERATOR = Operator("shop/relay-0")


@dataclass
class Relays:
    """What the surface asks, under the test's control."""

    statuses: list[RelayStatus] = field(default_factory=list)
    stopping: bool = False
    generations: dict[str, int] = field(default_factory=dict)
    assigned: list[tuple[str, int, dict[int, str]]] = field(default_factory=list)
    failure: Exception | None = None

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        if self.failure is not None:
            raise self.failure
        if generation <= self.generations[name]:  # a KeyError is a LookupError: not served here
            return False
        self.generations[name] = generation
        self.assigned.append((name, generation, owners))
        return True


async def serving(relays: Relays, callers: CallerAuth) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that lets these callers in."""
    server = HttpServer.bind("127.0.0.1", 0)
    surface = HttpApi(lambda: relays.statuses, relays.assign, callers, stopping=lambda: relays.stopping)
    await server.start(surface)
    try:
        async with aiohttp.ClientSession(server.address) as session:
            yield session
    finally:
        await server.close()
