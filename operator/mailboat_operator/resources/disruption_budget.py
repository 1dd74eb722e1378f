"""PodDisruptionBudget: a node drain evicts one relay at a time, so that its partitions can move meanwhile."""

from __future__ import annotations

from typing import Any

from mailboat_operator.resources.deployment import selector_labels
from mailboat_operator.resources.ownership import child_metadata
from mailboat_spec import OutboxRelay


def disruption_budget(relay: OutboxRelay) -> dict[str, Any]:
    """Build the object. With one replica, ``minAvailable`` would block every drain; ``maxUnavailable`` does not."""
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
