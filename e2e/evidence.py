"""State of a cluster at the failure of a test: resources, events and logs, as files."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster import Cluster
from mailboat_devservers.errors import ServerFailed

_KINDS = (
    "namespaces,nodes,pods,deployments,replicasets,statefulsets,jobs,services,endpointslices,configmaps,leases,"
    "poddisruptionbudgets,serviceaccounts,mutatingwebhookconfigurations"
)
_OURS = "outboxrelays,eventsubscriptions"


def collect_evidence(cluster: Cluster, folder: Path) -> None:
    """Replace the content of the folder. Secrets are left out. If a command fails, its file holds the error."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def keep(file: str, *command: str) -> str:
        answer = cluster.commands.try_kubectl(*command, "--request-timeout=20s")
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(answer.out + answer.err)
        return answer.out

    keep("overview.txt", "get", _KINDS, "--all-namespaces", "--output=wide")
    keep("mailboat.txt", "get", _OURS, "--all-namespaces", "--output=wide")  # fails as a whole without the CRDs
    keep("events.txt", "get", "events", "--all-namespaces", "--sort-by=.lastTimestamp")
    keep("resources.yaml", "get", _KINDS, "--all-namespaces", "--output=yaml")
    keep("mailboat.yaml", "get", _OURS, "--all-namespaces", "--output=yaml")
    pods = keep("pods.txt", "get", "pods", "--all-namespaces", "--no-headers", "--output=custom-columns=" + _PLACE)
    for line in pods.splitlines():
        namespace, pod = line.split()
        of_pod = ("--namespace", namespace, pod, "--all-containers", "--prefix", "--timestamps")
        keep(f"logs/{namespace}/{pod}.txt", "logs", *of_pod)
        if not keep(f"logs/{namespace}/{pod}-before.txt", "logs", *of_pod, "--previous"):
            (folder / f"logs/{namespace}/{pod}-before.txt").unlink()  # no container was restarted
    try:
        cluster.logs(folder / "node")
    except (ServerFailed, OSError) as reason:
        (folder / "node.txt").write_text(str(reason))


_PLACE = ":metadata.namespace,:metadata.name"
