"""Read and write Secrets, with writes conditional on the version read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from mailboat_operator.kube.client import SECRET, Kube, NotFound, Object
from mailboat_spec.names import MANAGED_BY, MANAGED_BY_LABEL


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
