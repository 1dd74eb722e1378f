"""ServiceAccount of a Deployment's pods: an identity without a token, since a relay never calls the API."""

from __future__ import annotations

from typing import Any

from mailboat_operator.resources.ownership import child_metadata
from mailboat_spec import OutboxRelay


def service_account(relay: OutboxRelay) -> dict[str, Any]:
    """Build the object. Used only if the template names no other ServiceAccount."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(relay),
        "automountServiceAccountToken": False,
    }
