"""Who may tell this relay what to do: the operator by its signature, or whoever holds the control token.

A relay that was given neither takes no orders. Both are read anew for every call, since both are rotated.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aiohttp import web

from mailboat.errors import ConfigError

log = logging.getLogger(__name__)

_READ_WITHIN = 10.0
"""Seconds for a body."""
_MISSING = "The token is missing or wrong: send Authorization: Bearer <token>."


class Unsigned(Exception):
    """The call is not one that this relay should follow. The message says why, and never repeats the token."""


class Signatures(Protocol):
    """Tells the operator's calls to this very relay from all others."""

    def check(self, token: str, method: str, path: str) -> str:
        """The digest that the body must have. Raises ``Unsigned``; ``ConfigError`` where no key can be read."""


@dataclass(frozen=True, slots=True)
class Callers:
    """The ways to be let in."""

    token_file: Path | None = None
    signed: Signatures | None = None

    async def body_of(self, request: web.Request) -> bytes:
        """What an allowed caller sent. Raises the answer for everybody else, before reading on where it can."""
        if self.token_file is None and self.signed is None:
            raise web.HTTPForbidden(
                text="Orders are not taken here: start the relay with --control-token-file or --control-keys.\n"
            )
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if self.token_file is not None and (self.signed is None or given.count(".") != 2):
            _compare(given, self.token_file)
            return await _read(request)
        assert self.signed is not None
        if not given.isascii() or not given:
            raise _unauthorized(_MISSING)
        try:
            digest = self.signed.check(given, request.method, request.path)
            body = await _read(request)
            check_body(digest, body)
        except Unsigned as error:
            log.warning("A call was refused: %s.", error, extra={"path": request.path, "from": request.remote})
            raise _unauthorized(f"The token of Authorization: Bearer is not good here: {error}.") from None
        except ConfigError as error:
            log.error("The operator's keys can't be used: %s", error)
            raise web.HTTPForbidden(
                text="Orders are not taken here: the relay can't read the operator's public keys.\n"
            ) from None
        return body


async def _read(request: web.Request) -> bytes:
    """The body. Raises the answer 413 beyond the application's limit, and 408 if it takes too long."""
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        async with asyncio.timeout(_READ_WITHIN):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"The body did not arrive within {_READ_WITHIN:.0f} seconds.\n") from None


def check_body(digest: str, body: bytes) -> None:
    """Raises ``Unsigned`` for a body that is not the one that was signed."""
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest().encode(), digest.encode()):
        raise Unsigned("it was signed for another body (sha256)")


def _compare(given: str, file: Path) -> None:
    try:
        expected = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        log.error("The control token can't be read.", extra={"file": str(file)})
        raise web.HTTPForbidden(
            text="Orders are not taken here: the relay can't read its control token file.\n"
        ) from None
    if not expected:
        raise web.HTTPForbidden(text="Orders are not taken here: the relay's control token file is empty.\n")
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode()):
        raise _unauthorized(_MISSING)


def _unauthorized(text: str) -> web.HTTPUnauthorized:
    return web.HTTPUnauthorized(text=text + "\n", headers={"WWW-Authenticate": "Bearer"})
