"""Rotation of the webhook's certificates by the leader: the Secret that holds them, and the caBundle.

``certificates.py`` decides; this module only orders the effects. The bundle is published before any
decision. A bundle that was just published must reach every API server before the successor in it is served. Writes are
conditional on the version read: if two leaders overlap, one of them starts over. Every run costs two reads; nothing is
written unless something changes.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from mailboat_operator.kube.client import MUTATING_WEBHOOK, Kube, NotFound, Object
from mailboat_operator.kube.secrets import SecretContent, read_secret, write_secret
from mailboat_operator.webhook.certificates import DEFAULT_LIFETIMES, Certificates, Lifetimes, renewed

log = logging.getLogger(__name__)


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class CertificateRotation:
    """Maintain the certificates in their Secret, and the matching caBundle."""

    kube: Kube
    namespace: str
    secret: str
    webhook_config: str
    names: tuple[str, ...]
    lifetimes: Lifetimes = DEFAULT_LIFETIMES
    now: Callable[[], datetime] = _utc_now

    async def rotate(self) -> None:
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
        after = renewed(found, self.names, self.now(), self.lifetimes)
        if after is None:
            return
        if just_published and found is not None and after.served is found.successor:
            return  # some API servers may not trust the successor yet; wait for the next run
        if content is not None and found is None:
            log.warning("Webhook Secret unusable, recreated", extra={"secret": self.secret})
        await write_secret(self.kube, self.namespace, self.secret, content, after.data())
        valid_until = after.served.certificate.not_valid_after_utc.isoformat()
        log.info("Webhook certificates renewed", extra={"secret": self.secret, "valid_until": valid_until})
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
        log.info("Updated caBundle", extra={"configuration": self.webhook_config})
        return True
