"""The headless Service: names for the relays, and something for monitors to select. Nothing is balanced through it."""

from __future__ import annotations

from typing import Any

from mailboat_operator.children.ownership import child_metadata
from mailboat_operator.podspec import PORT, PORT_NAME
from mailboat_spec import OutboxRelay
from mailboat_spec.names import RELAY_LABEL


def service(relay: OutboxRelay) -> dict[str, Any]:
    """Selects pods of the Deployment and pods with a sidecar alike, ready or not: a relay that fails is to be seen."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(relay),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RELAY_LABEL: relay.metadata.name},
            # By name: a sidecar may listen elsewhere than on the usual port.
            "ports": [{"name": PORT_NAME, "port": PORT, "protocol": "TCP", "targetPort": PORT_NAME}],
        },
    }
