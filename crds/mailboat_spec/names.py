"""Names shared between the CRDs, the operator, the relay and the chart.

A name in this module is part of the interface with a cluster: objects that carry it outlive the process that wrote it.
Nothing here may be renamed without a migration.
"""

from typing import Final

GROUP: Final = "mailboat.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

RELAY_KIND: Final = "OutboxRelay"
RELAY_PLURAL: Final = "outboxrelays"

SUBSCRIPTION_KIND: Final = "EventSubscription"
SUBSCRIPTION_PLURAL: Final = "eventsubscriptions"

DEFAULT_NAMESPACE: Final = "default"

FIELD_MANAGER: Final = "mailboat-operator"
"""Field manager of the operator in server-side apply."""

MAX_RELAY_NAME: Final = 57
"""Characters. The children of a relay are named ``NAME-relay``, and a Service's name has at most 63 characters."""

RELAY_LABEL: Final = f"{GROUP}/relay"
"""On a pod: the OutboxRelay whose sidecar is requested. On children of a relay: the relay they belong to."""

SUBSCRIPTION_LABEL: Final = f"{GROUP}/subscription"
"""On a pod: the EventSubscription whose consumer runs in it. Its status port is a container port of this name:"""
CONSUMER_PORT_NAME: Final = "mailboat"

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "mailboat"

INJECT_ANNOTATION: Final = f"{GROUP}/inject"
"""``"false"`` on a pod disables the injection that the label requests."""

INJECTED_ANNOTATION: Final = f"{GROUP}/injected"
"""On a pod with an injected sidecar: the hash of the sidecar's template."""

PORT_ANNOTATION: Final = f"{GROUP}/port"
"""On a pod: the HTTP port of its sidecar, if the default port is taken."""

CONFIG_VERSION_ANNOTATION: Final = f"{GROUP}/config-version"
"""On the OutboxRelay in a relay's configuration: a number that rises with every change, to detect stale versions."""
