"""The operator's signature on its calls to relays: Ed25519 keys in a Secret of its own, and tokens made with them.

Relays hold the public keys (``operator-keys.pem`` in their ConfigMap), so nothing in an application's namespace lets
anybody pretend to be the operator. Keys follow one another:

- A new key is published before it signs: for ``Rhythm.publish`` both public keys are in the ConfigMaps and the old one
  goes on signing. By then every relay has read the new one.
- The old key stays published for ``Rhythm.linger`` after its last signature, then it is forgotten.

A token is good for one call: it names the pod (audience), the method and path (subject) and the body (digest), and it
lives for a minute. The leader alone keeps and uses the ring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mailboat_spec.names import FIELD_MANAGER

ISSUER: Final = FIELD_MANAGER
LIFETIME: Final = timedelta(seconds=60)

_PREFIX: Final = "signing-"
_SUFFIX: Final = ".pem"


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When keys follow one another."""

    renew: timedelta = timedelta(days=30)
    publish: timedelta = timedelta(minutes=15)
    """Kubelets bring a changed ConfigMap to pods within about two minutes; the rest is for slow ones."""
    linger: timedelta = timedelta(hours=1)


DEFAULT_RHYTHM: Final = Rhythm()


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One private key and when it was made."""

    made: datetime
    private: Ed25519PrivateKey

    @classmethod
    def new(cls, now: datetime) -> SigningKey:
        return cls(now.astimezone(UTC).replace(microsecond=0), Ed25519PrivateKey.generate())

    @property
    def public_pem(self) -> str:
        return (
            self.private.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode()
        )

    @property
    def private_pem(self) -> bytes:
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys that are known, oldest first. Never empty."""

    keys: tuple[SigningKey, ...]

    @classmethod
    def parse(cls, data: Mapping[str, bytes]) -> KeyRing | None:
        """From the Secret. What can't be read is passed over; None: nothing is left."""
        keys = []
        for name, pem in data.items():
            made = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX) and made.isascii() and made.isdigit()):
                continue
            try:
                private = serialization.load_pem_private_key(pem, password=None)
                time = datetime.fromtimestamp(int(made), UTC)
            except (ValueError, TypeError, OverflowError, OSError):
                continue
            if isinstance(private, Ed25519PrivateKey):
                keys.append(SigningKey(time, private))
        return cls(tuple(sorted(keys, key=lambda key: key.made))) if keys else None

    def data(self) -> dict[str, bytes]:
        """For the Secret."""
        return {f"{_PREFIX}{int(key.made.timestamp())}{_SUFFIX}": key.private_pem for key in self.keys}

    def public_pem(self) -> str:
        """For ``operator-keys.pem``: every key, the old one and the one that will sign next."""
        return "".join(key.public_pem for key in self.keys)

    def signing(self, now: datetime, rhythm: Rhythm = DEFAULT_RHYTHM) -> SigningKey:
        """The newest key that relays have had the time to read; the oldest where none has."""
        published = [key for key in self.keys if now >= key.made + rhythm.publish]
        return published[-1] if published else self.keys[0]


def turned(ring: KeyRing | None, now: datetime, rhythm: Rhythm = DEFAULT_RHYTHM) -> KeyRing:
    """The ring as it should be now: with a new key when it is time for one, without those that nobody needs."""
    if ring is None:
        return KeyRing((SigningKey.new(now),))
    keys = ring.keys
    if now >= keys[-1].made + rhythm.renew:
        keys = (*keys, SigningKey.new(now))
    passed = [key for key, after in pairwise(keys) if now >= after.made + rhythm.publish + rhythm.linger]
    return KeyRing(tuple(key for key in keys if key not in passed))


def mint(ring: KeyRing, audience: str, method: str, path: str, body: bytes, now: datetime) -> str:
    """A token for one call. ``audience`` is ``namespace/pod/uid``."""
    issued = int(now.timestamp())
    claims = {
        "iss": ISSUER,
        "aud": audience,
        "sub": f"{method} {path}",
        "iat": issued,
        "exp": issued + int(LIFETIME.total_seconds()),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return jwt.encode(claims, ring.signing(now).private, algorithm="EdDSA")
