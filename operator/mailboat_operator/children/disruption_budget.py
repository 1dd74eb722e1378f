"""The PodDisruptionBudget: a drained node takes one relay at a time, so that its partitions find a home meanwhile."""

from __future__ import annotations

from typing import Any

from mailboat_operator.children.deployment import selector_labels
from mailboat_operator.children.ownership import child_metadata
from mailboat_spec import OutboxRelay


def disruption_budget(relay: OutboxRelay) -> dict[str, Any]:
    """``maxUnavailable`` and not ``minAvailable``: the latter with one replica would block every drain for ever."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(relay),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector_labels(relay.metadata.name)},
            # A relay that never gets ready must not keep a node from being emptied.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
