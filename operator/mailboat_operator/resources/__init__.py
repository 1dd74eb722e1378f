"""Children of a relay: one pure function per kind, from the resource to the complete object.

No function reads the cluster or the clock. All children of a relay share a name and labels, and have the relay as
controller in their owner reference, so that Kubernetes garbage collection removes them with it. ``owner_of`` tells them
from foreign objects.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, SERVICE, SERVICE_ACCOUNT, Kind
from mailboat_operator.resources import pod
from mailboat_operator.resources.configmap import Configuration, config_map_content
from mailboat_spec import FIELD_MANAGER, OutboxRelay, Runtime, names

CHILD_KINDS: Final = (CONFIG_MAP, SERVICE_ACCOUNT, SERVICE, DEPLOYMENT, DISRUPTION_BUDGET)
"""In order of creation: pods come last, after everything that they reference."""


class Owner(Enum):
    """Owner of an object, from the point of view of one relay."""

    OWN = "own"
    PREDECESSOR = "predecessor"
    """A deleted relay of the same name: Kubernetes removes the object soon."""
    FOREIGN = "foreign"


def desired(
    relay: OutboxRelay, secrets: Sequence[str], configuration: Configuration, public_keys: str, image: pod.RelayImage
) -> dict[Kind, dict[str, Any]]:
    """Return the desired children. A kind that is missing must not exist. ``secrets``: Secrets that relays mount.

    A relay with runtime Sidecar has a ConfigMap and a Service, but no pods of its own.
    """
    children: dict[Kind, dict[str, Any]] = {
        CONFIG_MAP: _child(CONFIG_MAP, relay, **config_map_content(configuration, public_keys)),
        SERVICE: service(relay),
    }
    if relay.spec.runtime is Runtime.DEPLOYMENT:
        children[DEPLOYMENT] = deployment(relay, image, secrets)
        children[DISRUPTION_BUDGET] = disruption_budget(relay)
        if relay.spec.template.service_account_name is None:
            # An identity without a token, since relays never call the API.
            children[SERVICE_ACCOUNT] = _child(SERVICE_ACCOUNT, relay, automountServiceAccountToken=False)
    return children


def deployment(relay: OutboxRelay, image: pod.RelayImage, secrets: Sequence[str]) -> dict[str, Any]:
    """Build the Deployment.

    Its template holds only parts that a running pod can't receive later: image, volumes, resources. Everything else is
    pushed, so a changed subscription causes no rollout unless it needs a Secret that is not mounted yet.
    """
    spec = {
        "replicas": relay.spec.replicas,
        "paused": False,  # else `kubectl rollout pause` would keep a new image or Secret from relays, unnoticed
        "progressDeadlineSeconds": 120,  # a hanging rollout is reported then, and continues when the cause is gone
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": selector_labels(relay.metadata.name)},
        # The new relay is ready before the old one stops, so its partitions move only once.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": _template(relay, image, secrets),
    }
    return _child(DEPLOYMENT, relay, spec=spec)


def selector_labels(relay: str) -> dict[str, str]:
    """Labels that select the Deployment's pods, but no application pod with a sidecar. A selector is immutable."""
    return {pod.NAME_LABEL: pod.APPLICATION, pod.INSTANCE_LABEL: relay}


def _template(relay: OutboxRelay, image: pod.RelayImage, secrets: Sequence[str]) -> dict[str, Any]:
    template, name = relay.spec.template, relay.metadata.name
    selector = {"matchLabels": selector_labels(name)}
    port = pod.chosen_port(template.annotations) or pod.PORT
    metadata: dict[str, Any] = {"labels": {**template.labels, **pod.relay_labels(name)}}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "containers": [pod.relay_container(template, image, secrets, port=port)],
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "serviceAccountName": template.service_account_name or pod.child_name(name),
        "terminationGracePeriodSeconds": pod.DRAIN_SECONDS,
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector}
            for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        ],
        "volumes": pod.relay_volumes(name, secrets),
    }
    further = template.manifest()
    copied = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets")
    spec.update({field: further[field] for field in copied if further[field]})
    return {"metadata": metadata, "spec": spec}


def deployment_failures(live: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return Kubernetes' messages about a Deployment; each is empty if there is no such failure.

    Why it can't create pods (a quota, a policy, a missing service account), and why its rollout failed: then the
    previous pods keep running.
    """
    conditions = ((live or {}).get("status") or {}).get("conditions") or ()
    messages = {
        (each.get("type"), each.get("status")): str(each.get("message") or each.get("reason") or each.get("type"))
        for each in conditions
    }
    return messages.get(("ReplicaFailure", "True"), ""), messages.get(("Progressing", "False"), "")


def service(relay: OutboxRelay) -> dict[str, Any]:
    """Build a headless Service: DNS names for the relays, and a target for monitors. It balances no traffic.

    It selects all pods with a relay, ready or not: failing relays must be visible.
    """
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.RELAY_LABEL: relay.metadata.name},
        # By name: a sidecar may listen on another port.
        "ports": [{"name": pod.PORT_NAME, "port": pod.PORT, "protocol": "TCP", "targetPort": pod.PORT_NAME}],
    }
    return _child(SERVICE, relay, spec=spec)


def disruption_budget(relay: OutboxRelay) -> dict[str, Any]:
    """Build a PodDisruptionBudget: a node drain evicts one relay at a time, so that its partitions can move meanwhile.

    With one replica, ``minAvailable`` would block every drain; ``maxUnavailable`` does not.
    """
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector_labels(relay.metadata.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a relay that never becomes ready must not block a drain
    }
    return _child(DISRUPTION_BUDGET, relay, spec=spec)


def _child(kind: Kind, relay: OutboxRelay, **fields: Any) -> dict[str, Any]:
    name = relay.metadata.name
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.RELAY_KIND,
        "name": name,
        "uid": relay.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "name": pod.child_name(name),
        "namespace": relay.metadata.namespace,
        "labels": pod.relay_labels(name),
        "ownerReferences": [owner],
    }
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **fields}


def owner_of(child: Mapping[str, Any], relay_name: str, relay_uid: str) -> Owner:
    """Determine the owner by the owner reference, since anyone can write labels.

    A child that the operator created and that has no owner is adopted: ``kubectl delete --cascade=orphan`` leaves such
    children for the next relay of the name.
    """
    metadata = child["metadata"]
    references = metadata.get("ownerReferences") or ()
    for reference in references:
        of_group = str(reference.get("apiVersion", "")).partition("/")[0] == names.GROUP
        if of_group and reference.get("kind") == names.RELAY_KIND:
            if reference.get("uid") == relay_uid:
                return Owner.OWN
            if reference.get("name") == relay_name:
                return Owner.PREDECESSOR
    owned = any(reference.get("controller") for reference in references)
    labelled = pod.relay_labels(relay_name).items() <= (metadata.get("labels") or {}).items()
    writers = [(entry.get("manager"), entry.get("operation")) for entry in metadata.get("managedFields") or ()]
    return Owner.OWN if labelled and not owned and (FIELD_MANAGER, "Apply") in writers else Owner.FOREIGN
