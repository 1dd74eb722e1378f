"""The leader's housekeeping: the webhook's certificates, the caBundle and the signing keys, each in its Secret.

Thin: ``certificates.py`` and ``tokens.py`` decide. What is here is the order of effects. The bundle is published before
anything else is decided, and what was published a moment ago is left to reach every API server before a serving
certificate moves to a CA that is new in it. A write is conditional on what was read: if two leaders overlap, one of
them starts over. Every look costs two reads; nothing is written unless something changes.
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
    """A Secret as it was read: its data, and the whole object for a conditional write."""

    data: Mapping[str, bytes]
    object: Object


async def read_secret(kube: Kube, namespace: str, name: str) -> SecretContent | None:
    """None: there is no such Secret."""
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
    """Raises ``Conflict`` when somebody else wrote since ``before``."""
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
    """Keeps the certificates in their Secret, and the caBundle equal to them."""

    kube: Kube
    namespace: str
    secret: str
    webhook_config: str
    names: tuple[str, ...]
    lifetimes: Lifetimes = DEFAULT_LIFETIMES
    now: Callable[[], datetime] = _utc_now

    async def look(self) -> None:
        """One look: publish, decide, act. Safe to break off anywhere."""
        content = await read_secret(self.kube, self.namespace, self.secret)
        found = Certificates.parse(content.data) if content is not None else None
        just_published, missing = False, None
        try:
            just_published = found is not None and await self._publish(found)
        except NotFound as error:
            missing = error  # operators need a certificate all the same: they are not ready without
        await self._renew(content, found, just_published)
        if missing is not None:
            raise missing

    async def _renew(self, content: SecretContent | None, found: Certificates | None, just_published: bool) -> None:
        now = self.now()
        decision = what_to_do(found, self.names, now, self.lifetimes)
        if decision is Decision.KEEP:
            return
        if decision is Decision.NEW_LEAF and just_published and found is not None and now < _end(found):
            return  # this CA may be news to some API server: at the next look
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
        """True: the bundle was not the right one, and is now."""
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
        # A list is replaced as a whole: only if nobody else changed it meanwhile.
        version = configuration["metadata"]["resourceVersion"]
        body: Object = {"metadata": {"resourceVersion": version}, "webhooks": changed}
        await self.kube.patch(MUTATING_WEBHOOK, None, self.webhook_config, body)
        log.info("The API server was told whom to trust.", extra={"configuration": self.webhook_config})
        return True


class Signing:
    """The ring in use: what the core signs its calls with and publishes to relays."""

    def __init__(self, ring: KeyRing, now: Callable[[], datetime] = _utc_now) -> None:
        self._ring = ring
        self._now = now

    def public_keys(self) -> str:
        """For ``operator-keys.pem``."""
        return self._ring.public_pem()

    def token(self, audience: str, method: str, path: str, body: bytes) -> str:
        """For one call; ``audience`` is ``namespace/pod/uid``."""
        return mint(self._ring, audience, method, path, body, self._now())

    def use(self, ring: KeyRing) -> None:
        self._ring = ring


@dataclass(frozen=True, slots=True)
class KeyKeeper:
    """Keeps the signing keys in their Secret."""

    kube: Kube
    namespace: str
    secret: str
    rhythm: Rhythm = DEFAULT_RHYTHM
    now: Callable[[], datetime] = _utc_now

    async def look(self) -> KeyRing:
        """The ring as it should be, written down before it is used."""
        content = await read_secret(self.kube, self.namespace, self.secret)
        found = KeyRing.parse(content.data) if content is not None else None
        ring = turned(found, self.now(), self.rhythm)
        if found is None or ring != found:
            await write_secret(self.kube, self.namespace, self.secret, content, ring.data())
            log.info("The signing keys were renewed.", extra={"secret": self.secret, "keys": len(ring.keys)})
        return ring


async def keep_looking(what: str, look: Callable[[], Awaitable[None]], every: float = LOOK_EVERY) -> None:
    """Look again and again, for ever. Trouble is told once, and tried again soon, then ever more seldom."""
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
