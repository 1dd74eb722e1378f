"""Authentication of control calls by the operator's signature. A relay without keys refuses all of them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from mailboat.errors import ConfigError

if TYPE_CHECKING:
    from mailboat.http.jwt_auth import JwtVerifier  # imports large libraries

log = logging.getLogger(__name__)

_READ_WITHIN = 10.0
"""Seconds within which a body must arrive."""


class Unsigned(Exception):
    """The call has no valid signature for this relay. The message gives the reason and never contains the token."""


@dataclass(frozen=True, slots=True)
class CallerAuth:
    """Credentials that control calls need. Without a verifier, no call is accepted."""

    verifier: JwtVerifier | None = None

    async def body_of(self, request: web.Request) -> bytes:
        """Return the body of an authenticated call. For others, raise the HTTP error, if possible before reading."""
        if self.verifier is None:
            raise web.HTTPForbidden(text="Calls are not accepted: start the relay with --control-keys.\n")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if not token.isascii() or not token:
            raise _unauthorized("The token is missing or wrong: send Authorization: Bearer <token>.")
        try:
            digest = self.verifier.check(token, request.method, request.path)
            body = await _read(request)
            check_body(digest, body)
        except Unsigned as error:
            log.warning("Call refused: %s", error, extra={"path": request.path, "from": request.remote})
            raise _unauthorized(f"The token of Authorization: Bearer is not valid here: {error}.") from None
        except ConfigError as error:
            log.error("Public keys of the operator are not readable: %s", error)
            raise web.HTTPForbidden(
                text="Calls are not accepted: the relay can't read the operator's public keys.\n"
            ) from None
        return body


async def _read(request: web.Request) -> bytes:
    """Return the body. Raises HTTP 413 beyond the application's limit, and 408 if the body takes too long."""
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        async with asyncio.timeout(_READ_WITHIN):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"The body did not arrive within {_READ_WITHIN:.0f} seconds.\n") from None


def check_body(digest: str, body: bytes) -> None:
    """Raise ``Unsigned`` if the body is not the signed one."""
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest().encode(), digest.encode()):
        raise Unsigned("it was signed for another body (sha256)")


def _unauthorized(text: str) -> web.HTTPUnauthorized:
    return web.HTTPUnauthorized(text=text + "\n", headers={"WWW-Authenticate": "Bearer"})
