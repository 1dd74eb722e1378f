"""Calls signed by the operator: a JWT per call, for one relay, path and body, valid for a minute.

The relay has public keys only, so no content of its pod can be used to call another relay. The file may contain several
keys, the old and the new one during rotation, and is read again after a change. Only EdDSA is accepted: a caller that
could choose the algorithm could sign with the public key. Imported only by a relay that has keys: the libraries take
9 MiB of a relay's 120 MiB.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from mailboat.errors import ConfigError
from mailboat.http.auth import Unsigned
from mailboat.runtime.file_watch import version_of

ISSUER: Final = "mailboat-operator"

_LEEWAY: Final = 30.0
"""Allowed clock skew in seconds."""
_END: Final = "-----END PUBLIC KEY-----"
_LARGEST: Final = 64 * 1024
_REASONS: Final[dict[type[jwt.InvalidTokenError], str]] = {
    jwt.ExpiredSignatureError: "it has expired (exp)",
    jwt.ImmatureSignatureError: "it is of the future (iat): compare the clocks",
    jwt.InvalidAudienceError: "it is for another relay (aud)",
    jwt.InvalidIssuerError: f"it is not from {ISSUER} (iss)",
    jwt.InvalidAlgorithmError: "its algorithm is not EdDSA",
}


def parse_keys(text: bytes, source: str) -> tuple[Ed25519PublicKey, ...]:
    """Parse concatenated Ed25519 public keys in PEM. Raises ``ConfigError``."""
    keys: list[Ed25519PublicKey] = []
    for block in text.decode("ascii", errors="replace").split(_END)[:-1]:
        try:
            key = load_pem_public_key((block.strip() + f"\n{_END}\n").encode())
        except (ValueError, UnsupportedAlgorithm):
            raise ConfigError(f"{source}: public key {len(keys) + 1} is not PEM: write the keys again") from None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"{source}: public key {len(keys) + 1} is not of the kind Ed25519")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} holds no public key")
    return tuple(keys)


@dataclass(eq=False)
class JwtVerifier:
    file: Path
    audience: str
    _version: object = None
    _keys: tuple[Ed25519PublicKey, ...] = ()

    def check(self, token: str, method: str, path: str) -> str:
        """Return the required digest of the body. Raises ``Unsigned``, or ``ConfigError`` if no key can be read."""
        claims = self._claims(token)
        if claims["sub"] != f"{method} {path}":
            raise Unsigned("it was signed for another call (sub)")
        if not isinstance(claims["sha256"], str):
            raise Unsigned("sha256 is not a text")
        return claims["sha256"]

    def _claims(self, token: str) -> Mapping[str, Any]:
        for key in self._current_keys():
            try:
                return jwt.decode(
                    token,
                    key,
                    algorithms=["EdDSA"],
                    audience=self.audience,
                    issuer=ISSUER,
                    leeway=_LEEWAY,
                    options={"require": ["iss", "aud", "iat", "exp", "sub", "sha256"], "strict_aud": True},
                )
            except jwt.InvalidSignatureError:
                continue  # another key may match
            except jwt.InvalidTokenError as error:
                raise Unsigned(_reason(error)) from error
        raise Unsigned("none of the operator's keys has signed it")

    def _current_keys(self) -> tuple[Ed25519PublicKey, ...]:
        try:
            version = version_of(self.file)
            if version != self._version:
                with self.file.open("rb") as opened:
                    self._keys = parse_keys(opened.read(_LARGEST), str(self.file))
                self._version = version
        except OSError as error:
            raise ConfigError(f"{self.file} can't be read: {error.strerror}") from error
        return self._keys


def _reason(error: jwt.InvalidTokenError) -> str:
    """Return the reason without the library's message, which may contain a part of the token."""
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"it says nothing about {error.claim}"
    return _REASONS.get(type(error), "it is no token")
