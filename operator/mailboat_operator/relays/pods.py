"""A pod, from the operator's point of view: does it contain a relay, on which address, with which Secrets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mailboat_operator.resources.pod import CONTAINER, PORT, chosen_port, is_injected, is_relay_pod, secret_volume
from mailboat_spec.names import CONSUMER_PORT_NAME, INJECT_ANNOTATION

_STARTING: Final = frozenset({"ContainerCreating", "PodInitializing", None, ""})
_LONGEST_PROBLEM: Final = 200


@dataclass(frozen=True, slots=True)
class PolledPod:
    """A pod with a status endpoint."""

    namespace: str
    name: str
    uid: str
    address: str
    """host:port; empty without an IP, or without a port."""


@dataclass(frozen=True, slots=True)
class RelayPod(PolledPod):
    """Relevant facts about a pod with the label of a relay."""

    own: bool
    """True for a pod of the relay's Deployment, False for an application's pod."""
    has_relay: bool
    opted_out: bool
    terminating: bool
    finished: bool
    ready: bool
    volumes: frozenset[str]
    problem: str = ""
    """Kubernetes' reason why the relay does not start, or how it ended; empty if there is none."""

    @property
    def relay_id(self) -> str:
        """Identity of the relay in the database, which relays of several namespaces may share."""
        return f"{self.namespace}/{self.name}"

    @property
    def audience(self) -> str:
        return f"{self.namespace}/{self.name}/{self.uid}"

    @property
    def alive(self) -> bool:
        """Whether the pod contains a relay that keeps running."""
        return self.has_relay and not self.terminating and not self.finished

    @property
    def lacks_sidecar(self) -> bool:
        """Whether the pod requests a sidecar and has none."""
        return not (self.own or self.has_relay or self.opted_out or self.terminating or self.finished)

    def mounts(self, secret: str) -> bool:
        """Return whether the pod has a volume for the Secret. The Secret itself may still be missing."""
        return secret_volume(secret) in self.volumes


@dataclass(frozen=True, slots=True)
class ConsumerPod(PolledPod):
    """Relevant facts about an application's pod in which a consumer runs. Its port has the name ``mailboat``."""

    created: str
    alive: bool


def consumer_pod(pod: Mapping[str, Any]) -> ConsumerPod:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    ports = [
        port.get("containerPort")
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
        if container.get("name") != CONTAINER  # a relay's sidecar has a port of the same name
        for port in container.get("ports") or ()
        if port.get("name") == CONSUMER_PORT_NAME
    ]
    return ConsumerPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        created=metadata.get("creationTimestamp") or "",
        address=_address(status.get("podIP"), ports[0]) if ports and ports[0] else "",
        alive=metadata.get("deletionTimestamp") is None and status.get("phase") not in ("Succeeded", "Failed"),
    )


def relay_pod(pod: Mapping[str, Any]) -> RelayPod:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    own = is_relay_pod(labels)
    conditions = [(each.get("type"), each.get("status")) for each in status.get("conditions") or ()]
    return RelayPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        address=_address(status.get("podIP"), chosen_port(annotations) or PORT),
        own=own,
        has_relay=bool(_relay_of(spec, "containers")) if own else is_injected(pod),
        opted_out=annotations.get(INJECT_ANNOTATION) == "false",
        terminating=metadata.get("deletionTimestamp") is not None,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        ready=("Ready", "True") in conditions,
        volumes=frozenset(volume["name"] for volume in spec.get("volumes") or ()),
        problem=_problem(spec, status),
    )


def _problem(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return the scheduler's reason, else the kubelet's.

    The text is constant: the kubelet alternates between pulling or restarting and waiting.
    """
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _with_reason("can't be scheduled", condition)
    relay = _relay_of(status, "initContainerStatuses", "containerStatuses")
    container = _relay_of(spec, "initContainers", "containers")
    waiting = (relay.get("state") or {}).get("waiting") or {}
    ended = (relay.get("state") or {}).get("terminated") or (relay.get("lastState") or {}).get("terminated") or {}
    if waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff"):
        return f"the image {container.get('image')} can't be pulled"
    if ended and not relay.get("ready"):
        return _ended(ended, container)
    return "" if waiting.get("reason") in _STARTING else _with_reason("can't start", waiting)


def _relay_of(part: Mapping[str, Any], *lists: str) -> Mapping[str, Any]:
    """Return the relay's entry in these lists of a pod's spec or status; empty if there is none."""
    each = (entry for name in lists for entry in part.get(name) or ())
    return next((entry for entry in each if entry.get("name") == CONTAINER), {})


def _ended(ended: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    """Say how the relay's container ended last. Its limit matters only if it ran out of memory."""
    reason, code = ended.get("reason") or "Error", ended.get("exitCode")
    if reason != "OOMKilled":
        return f"ended with exit code {code} ({reason}), and is restarted: see its log"
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    remedy = "raise spec.template.resources.limits.memory" if limit else "the node ran out of memory"
    return f"was killed (OOMKilled, exit code {code}, memory limit {limit or 'none'}), and is restarted: {remedy}"


def _with_reason(problem: str, source: Mapping[str, Any]) -> str:
    reason, message = source.get("reason") or "", str(source.get("message") or "")[:_LONGEST_PROBLEM]
    return f"{problem} ({reason}: {message})" if message else f"{problem} ({reason})"


def _address(ip: str | None, port: int) -> str:
    if not ip:
        return ""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
