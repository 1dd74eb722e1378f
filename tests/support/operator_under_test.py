"""The operator's controller inside a test, without leader election, on a real API server, with stub relays.

Tests read and write objects as the cluster's administrator. The operator is another user, so that its requests can be
counted.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from mailboat_devservers.kubernetes import ApiServer
from mailboat_operator.controller.controller import ControllerSettings, run_controller
from mailboat_operator.controller.workqueue import Backoff
from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    POD,
    RELAY,
    SERVICE,
    SERVICE_ACCOUNT,
    SUBSCRIPTION,
    Kind,
    Kube,
    Object,
)
from mailboat_operator.kube.errors import NotFound
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.signing_keys import Signer, turned
from mailboat_operator.resources.pod import CONTAINER, RESOURCES_KEY, RelayImage, relay_labels, relay_volumes
from mailboat_spec.names import INJECTED_ANNOTATION, RELAY_LABEL
from mailboat_spec.wire_format import unpack
from support.manifests import DATABASE_SECRET, event_subscription, kafka_sink, outbox_relay
from support.stub_relays import Outbox, RelayStandIn
from support.wait import PATIENCE, await_until

CHILDREN = (CONFIG_MAP, SERVICE, SERVICE_ACCOUNT, DEPLOYMENT, DISRUPTION_BUDGET)
"""Kinds of the children of an OutboxRelay with a Deployment, all with the same name."""

USER = "operator-under-test"


relay = partial(outbox_relay, namespace=None)


def subscription(name: str = "orders-to-kafka", of: str = "orders", **spec: Any) -> Object:
    return event_subscription(name, **{"sink": kafka_sink(), "relay": of, "namespace": None, "partitions": 4, **spec})


class Cluster:
    """One namespace, accessed as administrator, and the stub relays of its pods."""

    def __init__(self, api: ApiServer, kube: Kube, namespace: str, place: Path) -> None:
        self.api = api
        self.kube = kube
        self.namespace = namespace
        self.signer = Signer(turned(None, datetime.now(UTC)))
        self.outbox = Outbox()
        self.relays: dict[str, RelayStandIn] = {}
        self._keys = place / "operator-keys.pem"
        self._keys.write_text(self.signer.ring.public_pem())

    def trust(self, public_keys: str) -> None:
        """Let the relays trust the keys of another operator."""
        self._keys.write_text(public_keys)

    # ---- resources -------------------------------------------------------------------------------------------------

    async def create(self, kind: Kind, body: Object) -> Object:
        return await self.kube.create(kind, {**body, "metadata": {**body["metadata"], "namespace": self.namespace}})

    async def create_relay(self, name: str = "orders", **spec: Any) -> Object:
        return await self.create(RELAY, relay(name, **spec))

    async def create_subscription(self, name: str = "orders-to-kafka", of: str = "orders", **spec: Any) -> Object:
        return await self.create(SUBSCRIPTION, subscription(name, of, **spec))

    async def get(self, kind: Kind, name: str) -> Object:
        return await self.kube.get(kind, self.namespace, name)

    async def find(self, kind: Kind, name: str) -> Object | None:
        try:
            return await self.get(kind, name)
        except NotFound:
            return None

    async def patch(self, kind: Kind, name: str, body: Object) -> Object:
        return await self.kube.patch(kind, self.namespace, name, body)

    async def delete(self, kind: Kind, name: str) -> None:
        await self.kube.delete(kind, self.namespace, name)

    async def until(
        self, kind: Kind, name: str, matches: Callable[[Object], Any], what: str, timeout: float = PATIENCE
    ) -> Object:
        """Wait until the object exists and the condition holds, and return it."""

        async def poll() -> Any:
            found = await self.find(kind, name)
            return found if found is not None and matches({"status": {}, **found}) else None

        try:
            found: Object = await await_until(poll, timeout=timeout, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {await self.find(kind, name)}") from None
        return found

    async def until_condition(
        self, kind: Kind, name: str, type_: str, status: str, reason: str | None = None, timeout: float = PATIENCE
    ) -> Object:
        def matches(found: Object) -> bool:
            condition = condition_of(found, type_)
            return bool(condition) and condition["status"] == status and reason in (None, condition["reason"])

        return await self.until(kind, name, matches, f"{type_} {status} ({reason}) of {name}", timeout)

    async def events(self, name: str) -> list[tuple[str, str, str]]:
        """Return type, reason and message of every event about a resource."""
        listed = await self.kube.list(EVENT, self.namespace)
        return [
            (each["type"], each["reason"], each["note"]) for each in listed.items if each["regarding"]["name"] == name
        ]

    async def until_event(self, name: str, reason: str) -> list[tuple[str, str, str]]:
        """Wait for an event with this reason, and return all events of the resource.

        The operator writes an event after the status that it describes.
        """

        async def poll() -> list[tuple[str, str, str]]:
            events = await self.events(name)
            return events if any(given == reason for _, given, _ in events) else []

        return await await_until(poll, what=f"an event {reason} on {name}")

    # ---- pods ------------------------------------------------------------------------------------------------------

    async def run_pod(
        self,
        name: str,
        of: str = "orders",
        *,
        sidecar: bool = False,
        relay_inside: bool = True,
        secrets: tuple[str, ...] = (DATABASE_SECRET,),
        answering: bool = True,
        annotations: dict[str, str] | None = None,
        outbox: Outbox | None = None,
    ) -> RelayStandIn:
        """Create a running pod with a stub relay."""
        stub = RelayStandIn(outbox or self.outbox, name, self.namespace, self._keys)
        containers: list[Object] = [{"name": "application", "image": "application:1"}]
        container = {"name": CONTAINER, "image": "mailboat-relay:test"}
        spec: Object = {"containers": [container], "volumes": relay_volumes(of, secrets)}
        if sidecar:
            inits = [{**container, "restartPolicy": "Always"}] if relay_inside else []
            spec = {"containers": containers, "initContainers": inits, "volumes": relay_volumes(of, secrets)}
            if relay_inside:
                annotations = {INJECTED_ANNOTATION: "0123456789abcdef", **(annotations or {})}
        labels = {RELAY_LABEL: of} if sidecar else relay_labels(of)
        pod = await self.create(
            POD,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels, "annotations": annotations or {}},
                "spec": spec,
            },
        )
        stub.uid = pod["metadata"]["uid"]
        if answering:
            await stub.start()
        self.relays[name] = stub
        status = {
            "phase": "Running",
            "podIP": stub.ip,
            "podIPs": [{"ip": stub.ip}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self.kube.patch(POD, self.namespace, name, {"status": status}, "status")
        return stub

    async def remove_pod(self, name: str) -> None:
        await self.relays.pop(name).stop()
        # There is no kubelet to end the pod.
        await asyncio.to_thread(
            self.api.kubectl, "delete", "pod", name, "--namespace", self.namespace, "--grace-period=0", "--force"
        )

    async def close(self) -> None:
        for stub in self.relays.values():
            await stub.stop()


def condition_of(found: Object, type_: str) -> dict[str, Any]:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == type_), {})


def holders(found: Object) -> dict[int, str]:
    """Return the pods by partition, from the status."""
    return {each["partition"]: each["pod"] for each in (found.get("status") or {}).get("partitions") or ()}


def spread(*shares: int) -> Callable[[Object], bool]:
    """Return a condition: the pods have these numbers of partitions, in any order, and every partition has a pod."""

    def is_spread(found: Object) -> bool:
        counts = Counter(holders(found).values())
        return "" not in counts and sorted(counts.values()) == sorted(shares)

    return is_spread


def configuring(*expected: str) -> Callable[[Object], bool]:
    """Return a condition: a ConfigMap holds the resources of these names, in this order."""

    def matches(config_map: Object) -> bool:
        try:
            text = unpack(config_map["data"].get(RESOURCES_KEY, "").encode() or _binary(config_map))
            return [each["metadata"]["name"] for each in json.loads(text)["items"]] == list(expected)
        except ValueError:  # a corrupted ConfigMap
            return False

    return matches


def _binary(config_map: Object) -> bytes:
    return base64.b64decode(config_map.get("binaryData", {}).get(RESOURCES_KEY, ""))


def quick(namespace: str | None, **changes: Any) -> ControllerSettings:
    """Return settings of an operator with short intervals."""
    settings = ControllerSettings(
        image=RelayImage("mailboat-relay:test"),
        namespaces=(namespace,) if namespace else (),
        status_interval=0.3,
        relay_timeout=30.0,  # a stopped stub refuses connections, so no test waits for it
        backoff=Backoff(initial=0.1, longest=1.0),
    )
    return replace(settings, **changes)


@asynccontextmanager
async def operating(
    cluster: Cluster,
    settings: ControllerSettings | None = None,
    user: str = USER,
    groups: Sequence[str] = ("system:masters",),
    kubeconfig: Path | None = None,
) -> AsyncIterator[CollectorRegistry]:
    """Run the operator during the block. If the operator fails before the end of the block, the test fails."""
    if kubeconfig is None:
        kubeconfig = await asyncio.to_thread(cluster.api.kubeconfig_for, user, groups)
    kube = await Kube.connect(kubeconfig)
    registry = CollectorRegistry()
    task = asyncio.create_task(
        run_controller(kube, settings or quick(cluster.namespace), cluster.signer, Metrics(registry)), name="operator"
    )
    try:
        yield registry
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kube.close()
