"""Container of a relay: arguments, mounts, probes, security context and resources. Pure.

Deployment pods and injected sidecars are built from the same parts, so that a relay is the same in both runtimes. A
sidecar has no readiness probe, since the application must become ready even if the relay's database is down. Each
Secret is mounted whole, so that Kubernetes updates it in the running pod, and as optional, so that a missing one does
not keep a pod from starting.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mailboat_spec import EventSubscription, OutboxRelay, PodTemplate, names

CONTAINER: Final = "mailboat-relay"
PORT: Final = 9808
PORT_NAME: Final = "mailboat"

CONFIG_VOLUME: Final = "mailboat-config"
SCRATCH_VOLUME: Final = "mailboat-tmp"
CONFIG_FOLDER: Final = "/etc/mailboat/config"
SECRETS_FOLDER: Final = "/etc/mailboat/secrets"
RESOURCES_KEY: Final = "resources.yaml"
KEYS_KEY: Final = "operator-keys.pem"

NAME_LABEL: Final = "app.kubernetes.io/name"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
APPLICATION: Final = "mailboat-relay"
COMPONENT: Final = "relay"

USER: Final = 65532
"""Fixed here, not in the image: an application's pod may run as root, its sidecar may not."""

DRAIN_SECONDS: Final = 60
"""Seconds from SIGTERM to SIGKILL, for the batch in flight: its sink may take the whole delivery timeout."""

_OPTIONAL_SOURCES: Final = frozenset({"secretKeyRef", "configMapKeyRef", "fileKeyRef"})
"""Sources of variables that are separate objects and may be missing."""

_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "runAsGroup": USER,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True, slots=True)
class RelayImage:
    name: str
    pull_policy: str = "IfNotPresent"


def child_name(relay: str) -> str:
    """Return the common name of all children of a relay. Relay names are limited to 57 characters because of it."""
    return f"{relay}-relay"


def relay_labels(relay: str) -> dict[str, str]:
    """Labels of every child and of the pods of a Deployment."""
    return {
        NAME_LABEL: APPLICATION,
        INSTANCE_LABEL: relay,
        names.COMPONENT_LABEL: COMPONENT,
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
        names.RELAY_LABEL: relay,
    }


def is_relay_pod(labels: Mapping[str, str]) -> bool:
    """Return whether a pod belongs to a relay's Deployment; an application's pod that requests a sidecar does not."""
    return (labels.get(names.MANAGED_BY_LABEL), labels.get(names.COMPONENT_LABEL)) == (names.MANAGED_BY, COMPONENT)


def is_injected(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod has the operator's sidecar.

    The annotation alone is no proof, since templates are copied. The container's name is none either, since an
    application may use it.
    """
    annotated = names.INJECTED_ANNOTATION in ((pod.get("metadata") or {}).get("annotations") or {})
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    return annotated and any(
        each.get("name") == CONTAINER and each.get("restartPolicy") == "Always" for each in containers
    )


def chosen_port(annotations: Mapping[str, Any]) -> int | None:
    """Return the port of a relay: the pod's annotation, else the default; None if the annotation is not a port."""
    text = str(annotations.get(names.PORT_ANNOTATION, PORT)).strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
    return number if 1 <= number <= 65535 else None


def database_secrets(relay: OutboxRelay) -> tuple[str, ...]:
    return tuple(reference.name for reference in relay.spec.database.secret_refs())


def sink_secrets(subscription: EventSubscription) -> tuple[str, ...]:
    return tuple(sorted({reference.name for reference in subscription.spec.sink.chosen.secret_refs()}))


def secrets_in(subscription: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the Secrets in a sink's ``*SecretRef`` fields, also if the rest is not validated yet."""
    chosen = mapping(mapping(subscription.get("spec")).get("sink")).values()
    fields = [each for sink in chosen for each in mapping(sink).items()]
    secrets = [mapping(value).get("name") for field, value in fields if str(field).endswith("SecretRef")]
    return tuple(sorted({name for name in secrets if isinstance(name, str)}))


def has_source(subscription: Mapping[str, Any]) -> bool:
    """Return whether a subscription reads a broker, also if the rest is not validated yet."""
    return mapping(subscription.get("spec")).get("source") is not None and relay_of(subscription) is None


def relay_of(subscription: Mapping[str, Any]) -> str | None:
    """Return the name of a subscription's relay, also if the rest is not validated yet."""
    name = mapping(mapping(subscription.get("spec")).get("relayRef")).get("name")
    return name if isinstance(name, str) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one, for resources that are not validated yet."""
    return value if isinstance(value, Mapping) else {}


def secret_volume(secret: str) -> str:
    """Return the volume name for a Secret. Names of Secrets are too long for volumes, and may contain dots."""
    return f"mailboat-secret-{hashlib.sha256(secret.encode()).hexdigest()[:12]}"


def relay_volumes(relay: str, secrets: Iterable[str]) -> list[dict[str, Any]]:
    """Return the pod's volumes: config, one per Secret, and scratch space beside the read-only root filesystem."""
    return [
        {"name": CONFIG_VOLUME, "configMap": {"name": child_name(relay), "optional": True}},
        {"name": SCRATCH_VOLUME, "emptyDir": {"sizeLimit": "16Mi"}},
        *({"name": secret_volume(name), "secret": {"secretName": name, "optional": True}} for name in secrets),
    ]


def relay_container(
    template: PodTemplate, image: RelayImage, secrets: Iterable[str], *, port: int = PORT, sidecar: bool = False
) -> dict[str, Any]:
    """Return the container. A sidecar is an init container that keeps running: it starts first and stops last."""
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image.name,
        "imagePullPolicy": image.pull_policy,
        "args": _arguments(port),
        "env": _environment(template, optional=sidecar),
        "ports": [{"name": PORT_NAME, "containerPort": port, "protocol": "TCP"}],
        "resources": _resources(template),
        "securityContext": _merged(_SECURITY, template.security_context),
        "livenessProbe": {**_probe("/livez"), "initialDelaySeconds": 10, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": _mounts(secrets),
    }
    if sidecar:
        container["restartPolicy"] = "Always"
    else:
        container["readinessProbe"] = {**_probe("/readyz"), "periodSeconds": 2, "failureThreshold": 2}
    return container


def _arguments(port: int) -> list[str]:
    options = {
        "-f": f"{CONFIG_FOLDER}/{RESOURCES_KEY}",
        "--secrets-dir": SECRETS_FOLDER,
        "--listen": f"[::]:{port}",  # IPv4 and IPv6, as far as the node supports them
        "--advertise": "$(POD_IP)",  # pods do not know each other by name
        "--relay-id": "$(POD_NAMESPACE)/$(POD_NAME)",  # namespaces may share a database; see `RelayPod.relay_id`
        "--control-keys": f"{CONFIG_FOLDER}/{KEYS_KEY}",
        "--audience": "$(POD_NAMESPACE)/$(POD_NAME)/$(POD_UID)",
        "--log-format": "json",
    }
    return ["run", "--follow", *(word for option in options.items() for word in option)]


def _environment(template: PodTemplate, *, optional: bool) -> list[dict[str, Any]]:
    """Return the environment. The operator's variables come first, since others may refer to them, and take precedence.

    With ``optional``, references may be unresolved. A container with an unresolved reference does not start, and a
    sidecar would block the application.
    """
    own: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in (
            ("POD_NAME", "metadata.name"),
            ("POD_NAMESPACE", "metadata.namespace"),
            ("POD_UID", "metadata.uid"),
            ("POD_IP", "status.podIP"),
        )
    ]
    # So that `mailboat dlq list` and the like need no options in the container.
    own += [
        {"name": "MAILBOAT_MANIFESTS", "value": f"{CONFIG_FOLDER}/{RESOURCES_KEY}"},
        {"name": "MAILBOAT_SECRETS_DIR", "value": SECRETS_FOLDER},
    ]
    reserved = {each["name"] for each in own}
    further = [variable.manifest() for variable in template.env if variable.name not in reserved]
    return own + ([_optional(variable) for variable in further] if optional else further)


def _optional(variable: dict[str, Any]) -> dict[str, Any]:
    source = dict(variable.get("valueFrom") or {})
    for kind in _OPTIONAL_SOURCES & source.keys():
        if isinstance(source[kind], Mapping):
            source[kind] = {**source[kind], "optional": True}
    return {**variable, "valueFrom": source} if source else variable


def _resources(template: PodTemplate) -> dict[str, dict[str, str]]:
    """Return resources. If the template sets requests or limits, neither default is used."""
    given = {kind: values for kind, values in template.resources.manifest().items() if values}
    return given or {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}}


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PORT_NAME, "scheme": "HTTP"}, "timeoutSeconds": 3}


def _mounts(secrets: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": SCRATCH_VOLUME, "mountPath": "/tmp"},
        *({"name": secret_volume(name), "mountPath": f"{SECRETS_FOLDER}/{name}", "readOnly": True} for name in secrets),
    ]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into ``base``, field by field; null removes a field."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        result[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return {key: value for key, value in result.items() if value is not None}
