"""Clients of a relay's HTTP server, with and without a control token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from mailboat.http.auth import CallerAuth
from mailboat.http.jwt_auth import JwtVerifier
from support.http_api import OPERATOR, Relays, serving


@pytest.fixture
def relays() -> Relays:
    return Relays()


@pytest.fixture
async def client(relays: Relays, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that takes assignments."""
    keys = tmp_path / "keys.pem"
    keys.write_text(OPERATOR.public_keys)
    async for session in serving(relays, CallerAuth(JwtVerifier(keys, OPERATOR.audience))):
        yield session


@pytest.fixture
async def keyless(relays: Relays) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that was given no public keys."""
    async for session in serving(relays, CallerAuth()):
        yield session
