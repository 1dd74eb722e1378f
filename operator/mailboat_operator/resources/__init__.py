"""Children of a relay: one pure function per kind, from the resource to the complete object.

No function reads the cluster or the clock. All children of a relay share a name and labels, and have the relay as
controller in their owner reference, so that Kubernetes garbage collection removes them with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)
from mailboat_operator.resources.configmap import Configuration, config_map
from mailboat_operator.resources.deployment import deployment, selector_labels
from mailboat_operator.resources.ownership import child_metadata
from mailboat_operator.resources.pod import PORT, PORT_NAME, RelayImage
from mailboat_spec import OutboxRelay, Runtime
from mailboat_spec.names import RELAY_LABEL

CHILD_KINDS: Final = (CONFIG_MAP, SERVICE_ACCOUNT, SERVICE, DEPLOYMENT, DISRUPTION_BUDGET)
"""In order of creation: pods come last, after everything that they reference."""


def desired(
    relay: OutboxRelay, secrets: Sequence[str], configuration: Configuration, public_keys: str, image: RelayImage
) -> dict[Kind, Object]:
    """Return the desired children. A kind that is missing must not exist. ``secrets``: Secrets that relays mount.

    A relay with runtime Sidecar has a ConfigMap and a Service, but no pods of its own.
    """
    children: dict[Kind, Object] = {CONFIG_MAP: config_map(relay, configuration, public_keys), SERVICE: service(relay)}
    if relay.spec.runtime is Runtime.DEPLOYMENT:
        children[DEPLOYMENT] = deployment(relay, image, secrets)
        children[DISRUPTION_BUDGET] = disruption_budget(relay)
        if relay.spec.template.service_account_name is None:
            children[SERVICE_ACCOUNT] = service_account(relay)
    return children


def service(relay: OutboxRelay) -> Object:
    """Build a headless Service: DNS names for the relays, and a target for monitors. It balances no traffic.

    It selects all pods with a relay, ready or not: failing relays must be visible.
    """
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


def service_account(relay: OutboxRelay) -> Object:
    """Build the ServiceAccount of a Deployment's pods: an identity without a token, since relays never call the API."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(relay),
        "automountServiceAccountToken": False,
    }


def disruption_budget(relay: OutboxRelay) -> Object:
    """Build a PodDisruptionBudget: a node drain evicts one relay at a time, so that its partitions can move meanwhile.

    With one replica, ``minAvailable`` would block every drain; ``maxUnavailable`` does not.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(relay),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector_labels(relay.metadata.name)},
            # A relay that never becomes ready must not block a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
