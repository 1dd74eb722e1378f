"""Everything that a cluster holds, of whatever kind: what an uninstall leaves is told by listing, not by guessing."""

from __future__ import annotations

from typing import NamedTuple

from cluster import Cluster

# An address that Kubernetes keeps for a Service has a parent instead of a namespace.
_NAMESPACE = "{.metadata.namespace}{.spec.parentRef.namespace}"
_EACH = "{range .items[*]}{.kind} " + _NAMESPACE + " {.metadata.name}{'\\n'}{end}"


class Object(NamedTuple):
    kind: str
    namespace: str
    """Empty: it belongs to the whole cluster."""
    name: str


def inventory(cluster: Cluster) -> set[Object]:
    """All objects, but for events, which tell of what was."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()
    asked = ",".join(kind for kind in kinds if not kind.startswith("events"))
    listed = cluster.kubectl("get", asked, "--all-namespaces", f"--output=jsonpath={_EACH}")
    return {Object(*line.split(" ")) for line in listed.splitlines()}
