"""Clients of a relay's HTTP server, with and without a control token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from mailboat.http.auth import CallerAuth
from support.http_api import Relays, serving


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
    """A client of a server with a control token."""
    async for session in serving(relays, CallerAuth(token_file)):
        yield session


@pytest.fixture
async def tokenless(relays: Relays) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server without a control token."""
    async for session in serving(relays, CallerAuth()):
        yield session
