"""Headless Service: DNS names for the relays, and a target for monitors. No traffic is balanced through it."""

from __future__ import annotations

from typing import Any

from mailboat_operator.resources.ownership import child_metadata
from mailboat_operator.resources.pod import PORT, PORT_NAME
from mailboat_spec import OutboxRelay
from mailboat_spec.names import RELAY_LABEL


def service(relay: OutboxRelay) -> dict[str, Any]:
    """Build the object. It selects all pods with a relay, ready or not: failing relays must be visible."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(relay),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RELAY_LABEL: relay.metadata.name},
            # By name: a sidecar may listen on another port.
            "ports": [{"name": PORT_NAME, "port": PORT, "protocol": "TCP", "targetPort": PORT_NAME}],
        },
    }
