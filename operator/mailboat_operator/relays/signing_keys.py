"""Signatures on the operator's calls to relays: Ed25519 keys in their own Secret, and tokens signed with them.

Relays hold the public keys (``operator-keys.pem`` in their ConfigMap), so no object in an application's namespace
allows impersonating the operator. A new key is published for ``PUBLISH_FOR`` before it signs: by then every relay has
read it. The old key stays published for ``LINGER`` after its last signature.

A token is valid for one call: it names the pod (audience), the method and path (subject) and the body (digest), and
expires after a minute. Only the leader maintains and uses the ring.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mailboat_operator.kube.client import Kube
from mailboat_spec.names import FIELD_MANAGER

log = logging.getLogger(__name__)

ISSUER: Final = FIELD_MANAGER
LIFETIME: Final = timedelta(seconds=60)
RENEW_AFTER: Final = timedelta(days=30)
PUBLISH_FOR: Final = timedelta(minutes=15)
"""Kubelets update a changed ConfigMap in pods within about two minutes; the rest is for slow ones."""
LINGER: Final = timedelta(hours=1)

_PREFIX: Final = "signing-"
_SUFFIX: Final = ".pem"


@dataclass(frozen=True, slots=True)
class SigningKey:
    made: datetime
    private: Ed25519PrivateKey

    @classmethod
    def new(cls, now: datetime) -> SigningKey:
        return cls(now.astimezone(UTC).replace(microsecond=0), Ed25519PrivateKey.generate())

    @property
    def public_pem(self) -> str:
        public, form = self.private.public_key(), serialization.PublicFormat.SubjectPublicKeyInfo
        return public.public_bytes(serialization.Encoding.PEM, form).decode()

    @property
    def private_pem(self) -> bytes:
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All known keys, oldest first. Never empty."""

    keys: tuple[SigningKey, ...]

    @classmethod
    def parse(cls, data: Mapping[str, bytes]) -> KeyRing | None:
        """Parse the Secret's data. Skip unreadable entries; None if no key is left."""
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
        return {f"{_PREFIX}{int(key.made.timestamp())}{_SUFFIX}": key.private_pem for key in self.keys}

    def public_pem(self) -> str:
        """Return ``operator-keys.pem``: all keys, including the old one and the one that will sign next."""
        return "".join(key.public_pem for key in self.keys)

    def signing_key(self, now: datetime) -> SigningKey:
        """Return the newest key that relays have had time to read; the oldest if there is none."""
        published = [key for key in self.keys if now >= key.made + PUBLISH_FOR]
        return published[-1] if published else self.keys[0]


def turned(ring: KeyRing | None, now: datetime) -> KeyRing:
    """Return the current ring: with a new key if one is due, without expired ones."""
    if ring is None:
        return KeyRing((SigningKey.new(now),))
    keys = ring.keys
    if now >= keys[-1].made + RENEW_AFTER:
        keys = (*keys, SigningKey.new(now))
    passed = [key for key, after in pairwise(keys) if now >= after.made + PUBLISH_FOR + LINGER]
    return KeyRing(tuple(key for key in keys if key not in passed))


def mint(ring: KeyRing, audience: str, method: str, path: str, body: bytes, now: datetime) -> str:
    """Return a token for one call. ``audience`` is ``namespace/pod/uid``."""
    issued = int(now.timestamp())
    claims = {
        "iss": ISSUER,
        "aud": audience,
        "sub": f"{method} {path}",
        "iat": issued,
        "exp": issued + int(LIFETIME.total_seconds()),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return jwt.encode(claims, ring.signing_key(now).private, algorithm="EdDSA")


@dataclass(slots=True)
class Signer:
    """The key ring in use, replaced by a rotation: calls are signed with it, and relays get its public keys."""

    ring: KeyRing


@dataclass(frozen=True, slots=True)
class SigningKeyRotation:
    kube: Kube
    namespace: str
    secret: str
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def rotate(self) -> KeyRing:
        """Return the current key ring. A changed ring is written to the Secret before it is used."""
        content = await self.kube.read_secret(self.namespace, self.secret)
        found = KeyRing.parse(content.data) if content is not None else None
        ring = turned(found, self.now())
        if ring != found:
            await self.kube.write_secret(self.namespace, self.secret, content, ring.data())
            log.info("Signing keys renewed", extra={"secret": self.secret, "keys": len(ring.keys)})
        return ring
