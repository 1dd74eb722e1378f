"""The leader's periodic maintenance: webhook certificates, caBundle and signing keys, each in its Secret.

``certificates.py`` and ``tokens.py`` decide; this module only orders the effects. The bundle is published before any
decision. A bundle that was just published must reach every API server before a serving certificate moves to a CA that
is new in it. Writes are conditional on the version read: if two leaders overlap, one of them starts over. Every run
costs two reads; nothing is written unless something changes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from mailboat_operator.certificates import (
    DEFAULT_LIFETIMES,
    Certificates,
    Decision,
    Lifetimes,
    renewed,
    what_to_do,
)
from mailboat_operator.kube import MUTATING_WEBHOOK, SECRET, Kube, KubeError, NotFound, Object
from mailboat_operator.tokens import DEFAULT_RHYTHM, KeyRing, Rhythm, mint, turned
from mailboat_spec.names import MANAGED_BY, MANAGED_BY_LABEL

log = logging.getLogger(__name__)

LOOK_EVERY: Final = 30.0
_TRY_AGAIN_AFTER: Final = 1.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class SecretContent:
    """A Secret as read: its data, and the whole object for a conditional write."""

    data: Mapping[str, bytes]
    object: Object


async def read_secret(kube: Kube, namespace: str, name: str) -> SecretContent | None:
    """Read a Secret; None if it does not exist."""
    try:
        secret = await kube.get(SECRET, namespace, name)
    except NotFound:
        return None
    data = {}
    for key, value in (secret.get("data") or {}).items():
        try:
            data[key] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError, TypeError):
            continue
    return SecretContent(data, secret)


async def write_secret(
    kube: Kube, namespace: str, name: str, before: SecretContent | None, data: Mapping[str, bytes]
) -> None:
    """Write a Secret. Raises ``Conflict`` if it was written since ``before``."""
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    if before is not None:
        await kube.replace(SECRET, {**before.object, "data": encoded})
        return
    await kube.create(
        SECRET,
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": {MANAGED_BY_LABEL: MANAGED_BY}},
            "type": "Opaque",
            "data": encoded,
        },
    )


@dataclass(frozen=True, slots=True)
class CertificateKeeper:
    """Maintain the certificates in their Secret, and the matching caBundle."""

    kube: Kube
    namespace: str
    secret: str
    webhook_config: str
    names: tuple[str, ...]
    lifetimes: Lifetimes = DEFAULT_LIFETIMES
    now: Callable[[], datetime] = _utc_now

    async def look(self) -> None:
        """Publish, decide, act. Safe to interrupt at any point."""
        content = await read_secret(self.kube, self.namespace, self.secret)
        found = Certificates.parse(content.data) if content is not None else None
        just_published, missing = False, None
        try:
            just_published = found is not None and await self._publish(found)
        except NotFound as error:
            missing = error  # operators still need a certificate: they are not ready without one
        await self._renew(content, found, just_published)
        if missing is not None:
            raise missing

    async def _renew(self, content: SecretContent | None, found: Certificates | None, just_published: bool) -> None:
        now = self.now()
        decision = what_to_do(found, self.names, now, self.lifetimes)
        if decision is Decision.KEEP:
            return
        if decision is Decision.NEW_LEAF and just_published and found is not None and now < _end(found):
            return  # some API servers may not have this CA yet; wait for the next run
        if content is not None and found is None:
            log.warning("The webhook's Secret can't be used and is made anew.", extra={"secret": self.secret})
        after = renewed(found, decision, self.names, now, self.lifetimes)
        await write_secret(self.kube, self.namespace, self.secret, content, after.data())
        log.info(
            "The webhook's certificates were renewed.",
            extra={"decision": decision, "secret": self.secret, "valid_until": _end(after).isoformat()},
        )
        await self._publish(after)

    async def _publish(self, certificates: Certificates) -> bool:
        """Update the caBundle. Return True if it was changed."""
        try:
            configuration = await self.kube.get(MUTATING_WEBHOOK, None, self.webhook_config)
        except NotFound as error:
            raise NotFound(
                f"there is no MutatingWebhookConfiguration {self.webhook_config}: nothing is injected. Install the "
                "chart's, name yours with --webhook-config-name, or turn the webhook off with --webhook-certs off"
            ) from error
        bundle = base64.b64encode(certificates.bundle_pem()).decode()
        webhooks = configuration.get("webhooks") or []
        if all((each.get("clientConfig") or {}).get("caBundle") == bundle for each in webhooks):
            return False
        changed = [
            {**each, "clientConfig": {**(each.get("clientConfig") or {}), "caBundle": bundle}} for each in webhooks
        ]
        # The patch replaces the whole list, so it is conditional on the version read.
        version = configuration["metadata"]["resourceVersion"]
        body: Object = {"metadata": {"resourceVersion": version}, "webhooks": changed}
        await self.kube.patch(MUTATING_WEBHOOK, None, self.webhook_config, body)
        log.info("The API server was told whom to trust.", extra={"configuration": self.webhook_config})
        return True


class Signing:
    """The key ring in use: the core signs its calls with it and publishes its public keys to relays."""

    def __init__(self, ring: KeyRing, now: Callable[[], datetime] = _utc_now) -> None:
        self._ring = ring
        self._now = now

    def public_keys(self) -> str:
        """Return the content of ``operator-keys.pem``."""
        return self._ring.public_pem()

    def token(self, audience: str, method: str, path: str, body: bytes) -> str:
        """Return a token for one call; ``audience`` is ``namespace/pod/uid``."""
        return mint(self._ring, audience, method, path, body, self._now())

    def use(self, ring: KeyRing) -> None:
        self._ring = ring


@dataclass(frozen=True, slots=True)
class KeyKeeper:
    """Maintain the signing keys in their Secret."""

    kube: Kube
    namespace: str
    secret: str
    rhythm: Rhythm = DEFAULT_RHYTHM
    now: Callable[[], datetime] = _utc_now

    async def look(self) -> KeyRing:
        """Return the current key ring. A changed ring is written to the Secret before it is used."""
        content = await read_secret(self.kube, self.namespace, self.secret)
        found = KeyRing.parse(content.data) if content is not None else None
        ring = turned(found, self.now(), self.rhythm)
        if found is None or ring != found:
            await write_secret(self.kube, self.namespace, self.secret, content, ring.data())
            log.info("The signing keys were renewed.", extra={"secret": self.secret, "keys": len(ring.keys)})
        return ring


async def keep_looking(what: str, look: Callable[[], Awaitable[None]], every: float = LOOK_EVERY) -> None:
    """Run ``look`` periodically until cancelled. Log the same error once, and retry with growing back-off."""
    complaint, troubles = "", 0
    while True:
        try:
            await look()
            complaint, troubles, pause = "", 0, every
        except KubeError as error:
            if str(error) != complaint:
                log.warning("Trouble with %s; trying again.", what, extra={"error": str(error)})
            complaint, troubles = str(error), min(troubles + 1, 10)
            pause = min(every, max(error.retry_after or 0, _TRY_AGAIN_AFTER * 2 ** (troubles - 1)))
        await asyncio.sleep(pause)


def _end(certificates: Certificates) -> datetime:
    return certificates.leaf.not_valid_after_utc
