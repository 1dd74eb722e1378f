"""List of all objects of a cluster, of every kind, to find the objects that an uninstall leaves."""

from __future__ import annotations

from typing import NamedTuple

from cluster import Cluster

# An IPAddress of a Service has a parent reference instead of a namespace.
_NAMESPACE = "{.metadata.namespace}{.spec.parentRef.namespace}"
_EACH = "{range .items[*]}{.kind} " + _NAMESPACE + " {.metadata.name}{'\\n'}{end}"


class Object(NamedTuple):
    kind: str
    namespace: str
    """Empty for cluster-scoped objects."""
    name: str


def inventory(cluster: Cluster) -> set[Object]:
    """All objects except events."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()
    listed_kinds = ",".join(kind for kind in kinds if not kind.startswith("events"))
    listed = cluster.kubectl("get", listed_kinds, "--all-namespaces", f"--output=jsonpath={_EACH}")
    return {Object(*line.split(" ")) for line in listed.splitlines()}
