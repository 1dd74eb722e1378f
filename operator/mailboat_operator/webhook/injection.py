"""Sidecar injection as a JSON patch. Pure.

A pod requests a relay by the label ``mailboat.dev/relay: <name>``. It gets a native sidecar: an init container with
restartPolicy Always, which starts before the application, stops after it, and does not keep a Job from finishing. It is
the first one, so that init containers that emit events have a relay. It must never keep the application from starting:

- if a sidecar can't be injected, it is omitted; the answer is a warning with a remedy, never a refusal;
- if the API server would reject the sidecar (``trial``), it is omitted: the whole pod would be refused;
- it takes no port that a container of the pod declares: it starts first, and the application could not listen there;
- its volumes and the sources of its environment variables are optional; it has no startup or readiness probe;
- on the node's network it declares no port: the scheduler would require a node where that port is free;
- its scratch volumes are in memory: with other local storage, autoscalers do not evict the pod from its node;
- it gets no API token: an empty folder is mounted where Kubernetes would put one.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic import ValidationError

from mailboat_operator.kube.client import Object
from mailboat_operator.resources.pod import (
    CONTAINER,
    PORT,
    RelayImage,
    chosen_port,
    database_secrets,
    is_injected,
    is_relay_pod,
    relay_container,
    relay_of,
    relay_volumes,
    secrets_in,
)
from mailboat_spec import OutboxRelay, Runtime
from mailboat_spec.names import INJECT_ANNOTATION, INJECTED_ANNOTATION, PORT_ANNOTATION, RELAY_LABEL

TOKEN_FOLDER: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
NO_TOKEN_VOLUME: Final = "mailboat-no-token"

_USUAL: Final = range(PORT, 65536)
"""Candidate ports in order of preference, if none is requested."""
_MIRROR: Final = "kubernetes.io/config.mirror"
_LONGEST_WARNING: Final = 250
"""Characters. The API server truncates warnings, and drops all of them if their total size is too large."""

_ABOUT_A_FIELD: Final = re.compile(
    r'POST \S+: Deployment\.apps "[^"]*" is invalid: .*spec\.template\.spec\.(initContainers\[0\]|volumes)', re.DOTALL
)
_UNREADABLE: Final = re.compile(
    r"POST \S+: Deployment in version \S+ cannot be (handled|unmarshall?ed) as a Deployment"
)

Pod = Mapping[str, Any]


class Outcome(StrEnum):
    """Outcome of one request; a label of the metrics."""

    INJECTED = "injected"
    NOT_ASKED = "not_asked"
    """No label, opted out, a relay's own pod, or already injected."""
    LEFT_OUT = "left_out"
    """Requested but not possible; a warning contains the reason."""
    FAILED = "failed"
    """The operator could not decide."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    container: dict[str, Any]
    volumes: tuple[dict[str, Any], ...]

    @property
    def mark(self) -> str:
        """Hash of the sidecar: the value of the annotation."""
        text = json.dumps([self.container, self.volumes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Injection:
    outcome: Outcome
    patch: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    sidecar: Sidecar | None = None


def requested_relay(pod: Pod) -> str | None:
    """Return the name of the relay that a pod still needs; None if there is nothing to do."""
    metadata = pod.get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    name = labels.get(RELAY_LABEL)
    unwanted = is_relay_pod(labels) or _MIRROR in annotations or annotations.get(INJECT_ANNOTATION) == "false"
    return None if not name or unwanted or is_injected(pod) else str(name)


def inject(
    pod: Pod, namespace: str, relay: Object | None, subscriptions: Iterable[Object], image: RelayImage
) -> Injection:
    """Return the answer for a pod. Relay and subscriptions are API objects; ``relay`` is None if it does not exist."""
    name = requested_relay(pod)
    if name is None:
        return Injection(Outcome.NOT_ASKED)
    if relay is None:
        without = "the pod starts without a relay. Create it, then restart the pod"
        return left_out(f'no OutboxRelay "{name}" in namespace {namespace}: {without}')
    try:
        resource = OutboxRelay.model_validate(relay, by_alias=True, by_name=False)
    except ValidationError:
        return left_out(f'OutboxRelay "{name}" is invalid: the pod starts without a relay. Its conditions say why')
    if resource.spec.runtime is not Runtime.SIDECAR:
        return left_out(
            f'OutboxRelay "{name}" has runtime Deployment: no sidecar is needed. '
            f"Remove the label {RELAY_LABEL}, or set runtime: Sidecar"
        )
    if ((pod.get("spec") or {}).get("os") or {}).get("name") == "windows":
        return left_out(f'there are no relays for Windows: use runtime Deployment for OutboxRelay "{name}"')
    return _injected(pod, resource, _secrets(resource, subscriptions), image)


def trial(sidecar: Sidecar, namespace: str) -> dict[str, Any]:
    """Return a Deployment with the sidecar in its template, for a dry run: would the API server accept such a pod?

    Much of a relay's template (security context, resources, environment) is passed on unchanged, and only the API
    server has all validation rules. A rejected sidecar must not be added to an application's pod.
    """
    labels = {"mailboat.dev/trial": sidecar.mark}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"generateName": "mailboat-trial-", "namespace": namespace},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "initContainers": [sidecar.container],
                    "containers": [{"name": "application", "image": sidecar.container["image"]}],
                    "volumes": list(sidecar.volumes),
                },
            },
        },
    }


def sidecar_error(refusal: str) -> str | None:
    """Extract the error in a sidecar from a refused trial, short enough for a warning; None if there is none.

    A policy or a third-party webhook may refuse any Deployment for other reasons, which do not apply to pods. Only the
    API server's own messages about fields of the sidecar count.
    """
    if not _ABOUT_A_FIELD.match(refusal) and not _UNREADABLE.match(refusal):
        return None
    _, _, invalid = refusal.partition("is invalid: ")
    reason = invalid or refusal.rpartition(" as a Deployment: ")[2]
    reason = reason.replace("spec.template.spec.initContainers[0].", "")
    reason = re.sub(r"json: cannot unmarshal (\w+) into Go .*?\.initContainers\.", r"a \1 does not fit into ", reason)
    return re.sub(r"Invalid value: \{.*\}: ", "", reason)


def left_out(*reasons: str, outcome: Outcome = Outcome.LEFT_OUT) -> Injection:
    """Answer without a sidecar, with the reasons. The pod starts anyway."""
    return Injection(outcome, warnings=tuple(map(_warning, reasons)))


def _injected(pod: Pod, relay: OutboxRelay, secrets: Sequence[str], image: RelayImage) -> Injection:
    port, warnings = _port(pod)
    if port is None:
        return left_out(*warnings)
    on_node = bool((pod.get("spec") or {}).get("hostNetwork"))
    container = _sidecar(relay_container(relay.spec.template, image, secrets, port=port, sidecar=True), port, on_node)
    volumes = [_in_memory(each) for each in relay_volumes(relay.metadata.name, secrets)]
    volumes.append(_in_memory({"name": NO_TOKEN_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}}))
    if conflict := _name_conflict(pod, volumes):
        return left_out(f"the pod has {conflict} of its own: no relay was added. Rename it, then restart the pod")
    if on_node:
        remedy = f"two such pods on one node need different ports (annotation {PORT_ANNOTATION})"
        warnings.append(f"the relay listens on port {port} of the node: {remedy}")
    # The operator finds the relay by this annotation.
    noted = chosen_port((pod.get("metadata") or {}).get("annotations") or {}) or PORT
    pull_secrets = [each.manifest() for each in relay.spec.template.image_pull_secrets]
    missing = [each for each in pull_secrets if each not in _items(pod, "imagePullSecrets")]
    sidecar = Sidecar(container, tuple(volumes))
    patch = [
        *_add(pod, "initContainers", [container], at="0"),
        *_add(pod, "volumes", volumes),
        *_add(pod, "imagePullSecrets", missing),
        *_annotate(pod, {INJECTED_ANNOTATION: sidecar.mark, **({PORT_ANNOTATION: str(port)} if port != noted else {})}),
    ]
    return Injection(Outcome.INJECTED, tuple(patch), tuple(map(_warning, warnings)), sidecar)


def _sidecar(container: dict[str, Any], port: int, on_node: bool) -> dict[str, Any]:
    probe = container["livenessProbe"]
    container["livenessProbe"] = {**probe, "httpGet": {**probe["httpGet"], "port": port}}
    container["volumeMounts"].append({"name": NO_TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True})
    if on_node:
        del container["ports"]
    return container


def _in_memory(volume: dict[str, Any]) -> dict[str, Any]:
    return {**volume, "emptyDir": {**volume["emptyDir"], "medium": "Memory"}} if "emptyDir" in volume else volume


def _secrets(relay: OutboxRelay, subscriptions: Iterable[Object]) -> tuple[str, ...]:
    """Names of all Secrets that the relay needs, including those of invalid subscriptions.

    Relays keep the last valid form of a subscription, and a Secret can't be added to a running pod.
    """
    of_relay = (each for each in subscriptions if relay_of(each) == relay.metadata.name)
    return tuple(sorted({*database_secrets(relay), *(name for each in of_relay for name in secrets_in(each))}))


def _port(pod: Pod) -> tuple[int | None, list[str]]:
    """Return the port for the relay, with warnings about it; None if there is no port for it."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    used = {port.get("containerPort") for each in _containers(pod) for port in each.get("ports") or ()}
    port = chosen_port(annotations)
    if port is not None and port not in used:
        return port, []
    free = next(each for each in _USUAL if each not in used)
    if port is None:
        return free, [f"{PORT_ANNOTATION} is no port (1 to 65535): the relay listens on {free}"]
    if PORT_ANNOTATION in annotations:
        without = "it starts without one. Choose another port, then restart the pod"
        return None, [f"a container of the pod has port {port}, which {PORT_ANNOTATION} gives to the relay: {without}"]
    return free, [f"a container of the pod has port {port}: the relay listens on {free} ({PORT_ANNOTATION})"]


def _containers(pod: Pod) -> list[Any]:
    return [*_items(pod, "containers"), *_items(pod, "initContainers")]


def _name_conflict(pod: Pod, volumes: Iterable[Mapping[str, Any]]) -> str | None:
    if any(each.get("name") == CONTAINER for each in _containers(pod)):
        return f'a container called "{CONTAINER}"'
    conflicts = {each.get("name") for each in _items(pod, "volumes")} & {each["name"] for each in volumes}
    return f'a volume called "{min(conflicts)}"' if conflicts else None


def _items(pod: Pod, field: str) -> list[Any]:
    return (pod.get("spec") or {}).get(field) or []


def _add(pod: Pod, field: str, items: list[dict[str, Any]], at: str = "-") -> list[dict[str, Any]]:
    """Return the steps that add items to a list in the pod's spec: at its end, or in front of an index."""
    if items and _items(pod, field):
        return [{"op": "add", "path": f"/spec/{field}/{at}", "value": item} for item in items]
    return [{"op": "add", "path": f"/spec/{field}", "value": items}] if items else []


def _annotate(pod: Pod, annotations: Mapping[str, str]) -> list[dict[str, Any]]:
    if (pod.get("metadata") or {}).get("annotations"):
        return [
            {"op": "add", "path": f"/metadata/annotations/{name.replace('/', '~1')}", "value": value}
            for name, value in annotations.items()
        ]
    return [{"op": "add", "path": "/metadata/annotations", "value": dict(annotations)}]


def _warning(text: str) -> str:
    text = f"mailboat: {text}"
    return text if len(text) <= _LONGEST_WARNING else text[: _LONGEST_WARNING - 3] + "..."
