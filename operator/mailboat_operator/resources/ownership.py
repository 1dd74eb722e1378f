"""Ownership of children: the metadata of every child, and the distinction between own and foreign objects."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from mailboat_operator.resources.pod import child_name, relay_labels
from mailboat_spec import API_VERSION, FIELD_MANAGER, RELAY_KIND, OutboxRelay


class Owner(Enum):
    """Owner of an object, from the point of view of one relay."""

    OWN = "own"
    PREDECESSOR = "predecessor"
    """A deleted relay of the same name: Kubernetes removes the object soon."""
    FOREIGN = "foreign"


def child_metadata(relay: OutboxRelay) -> dict[str, Any]:
    """Name, labels, and the owner reference for garbage collection."""
    name = relay.metadata.name
    return {
        "name": child_name(name),
        "namespace": relay.metadata.namespace,
        "labels": relay_labels(name),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": RELAY_KIND,
                "name": name,
                "uid": relay.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def owner_of(child: Mapping[str, Any], relay_name: str, relay_uid: str) -> Owner:
    """Determine the owner by the owner reference, since anyone can write labels.

    A child that the operator created and that has no owner is adopted: ``kubectl delete --cascade=orphan`` leaves such
    children for the next relay of the name.
    """
    references = child["metadata"].get("ownerReferences") or ()
    group = API_VERSION.partition("/")[0]
    for reference in references:
        of_group = str(reference.get("apiVersion", "")).partition("/")[0] == group
        if of_group and reference.get("kind") == RELAY_KIND:
            if reference.get("uid") == relay_uid:
                return Owner.OWN
            if reference.get("name") == relay_name:
                return Owner.PREDECESSOR
    owned = any(reference.get("controller") for reference in references)
    return Owner.OWN if not owned and _created_by_operator(child["metadata"], relay_name) else Owner.FOREIGN


def _created_by_operator(metadata: Mapping[str, Any], relay_name: str) -> bool:
    labelled = relay_labels(relay_name).items() <= (metadata.get("labels") or {}).items()
    return labelled and any(
        entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        for entry in metadata.get("managedFields") or ()
    )
