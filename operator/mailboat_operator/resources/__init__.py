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
from mailboat_operator.resources.deployment import deployment
from mailboat_operator.resources.disruption_budget import disruption_budget
from mailboat_operator.resources.pod import RelayImage
from mailboat_operator.resources.service import service
from mailboat_operator.resources.service_account import service_account
from mailboat_spec import OutboxRelay, Runtime

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
