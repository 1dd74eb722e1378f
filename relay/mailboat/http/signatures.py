"""Calls signed by the operator: a JWT per call, made for this relay, this path and this body, valid for a minute.

The relay holds public keys only, so nothing that lies in its pod could be used to speak to another relay. The file may
hold several keys, the old and the new one while they are rotated, and is read anew when it changes. Only EdDSA counts:
whoever could choose the algorithm could sign with what is public. Imported only by a relay that was given keys: what
checks signatures takes 9 MiB, and a relay has 120 in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from mailboat.errors import ConfigError
from mailboat.http.callers import Unsigned
from mailboat.runtime.watching import version_of

ISSUER: Final = "mailboat-operator"

_ALGORITHMS: Final = ["EdDSA"]
_LEEWAY: Final = 30.0
"""Seconds by which two clocks may differ."""
_REQUIRED: Final = ["iss", "aud", "iat", "exp", "sub", "sha256"]
_END: Final = "-----END PUBLIC KEY-----"
_LARGEST: Final = 64 * 1024


class PublicKeys:
    """The keys in a file, as they are now."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._version: object = None
        self._keys: tuple[Ed25519PublicKey, ...] = ()

    def read(self) -> tuple[Ed25519PublicKey, ...]:
        """Raises ``ConfigError`` where there is no key to be had."""
        try:
            version = version_of(self.file)
            if version != self._version:
                with self.file.open("rb") as opened:
                    self._keys = parse_keys(opened.read(_LARGEST), str(self.file))
                self._version = version
        except OSError as error:
            raise ConfigError(f"{self.file} can't be read: {error.strerror}") from error
        return self._keys


def parse_keys(text: bytes, source: str) -> tuple[Ed25519PublicKey, ...]:
    """Ed25519 public keys in PEM, one behind the other. Raises ``ConfigError``."""
    keys: list[Ed25519PublicKey] = []
    for block in text.decode("ascii", errors="replace").split(_END)[:-1]:
        try:
            key = load_pem_public_key((block.strip() + f"\n{_END}\n").encode())
        except (ValueError, UnsupportedAlgorithm):
            raise ConfigError(f"{source}: public key {len(keys) + 1} is not PEM: write the keys anew") from None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"{source}: public key {len(keys) + 1} is not of the kind Ed25519")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} holds no public key")
    return tuple(keys)


class SignedCalls:
    """Tells the operator's calls to this very relay from all others."""

    def __init__(self, keys: PublicKeys, audience: str) -> None:
        self.keys = keys
        self._audience = audience

    def check(self, token: str, method: str, path: str) -> str:
        """The digest that the body must have. Raises ``Unsigned``; ``ConfigError`` where no key can be read."""
        claims = self._claims(token)
        if claims["sub"] != f"{method} {path}":
            raise Unsigned("it was signed for another call (sub)")
        if not isinstance(claims["sha256"], str):
            raise Unsigned("sha256 is not a text")
        return claims["sha256"]

    def _claims(self, token: str) -> Mapping[str, Any]:
        for key in self.keys.read():
            try:
                return jwt.decode(
                    token,
                    key,
                    algorithms=_ALGORITHMS,
                    audience=self._audience,
                    issuer=ISSUER,
                    leeway=_LEEWAY,
                    options={"require": _REQUIRED, "strict_aud": True},
                )
            except jwt.InvalidSignatureError:
                continue  # another key may fit
            except jwt.InvalidTokenError as error:
                raise Unsigned(_reason(error)) from error
        raise Unsigned("none of the operator's keys has signed it")


def _reason(error: jwt.InvalidTokenError) -> str:
    """In words of our own: those of the library may repeat a part of the token."""
    match error:
        case jwt.ExpiredSignatureError():
            return "it has expired (exp)"
        case jwt.ImmatureSignatureError():
            return "it is of the future (iat): compare the clocks"
        case jwt.InvalidAudienceError():
            return "it is for another relay (aud)"
        case jwt.InvalidIssuerError():
            return f"it is not from {ISSUER} (iss)"
        case jwt.MissingRequiredClaimError():
            return f"it says nothing about {error.claim}"
        case jwt.InvalidAlgorithmError():
            return "its algorithm is not EdDSA"
    return "it is no token"
