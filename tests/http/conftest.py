"""A relay's HTTP side on a real socket, with a status that the test may change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from mailboat.http.server import HttpServer, Surface
from mailboat.runtime.status import RelayStatus


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


@pytest.fixture
def relays() -> Relays:
    return Relays()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("correct-horse\n")
    return path


@pytest.fixture
async def client(relays: Relays, token_file: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that takes assignments."""
    async for session in serving(relays, token_file):
        yield session


@pytest.fixture
async def tokenless(relays: Relays) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that was given no control token."""
    async for session in serving(relays, None):
        yield session


async def serving(relays: Relays, token_file: Path | None) -> AsyncIterator[aiohttp.ClientSession]:
    server = HttpServer.bind("127.0.0.1", 0)
    await server.start(Surface(lambda: relays.statuses, relays.assign, token_file, lambda: relays.stopping))
    try:
        async with aiohttp.ClientSession(server.address) as session:
            yield session
    finally:
        await server.close()
