"""Kubernetes API client of this operator: a few verbs on plain objects, and errors classified by the required reaction.

Objects are the plain JSON of the API: the operator passes most of them on, so a model of every field has no benefit.
Nothing here decides, waits or retries: back-off is up to the caller, and ``retry_after`` has the server's Retry-After.
"""

import asyncio
import base64
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException

from mailboat_operator.kube.errors import ApiUnavailable, NoCluster, NotFound, answer_error
from mailboat_spec import names

Object = dict[str, Any]
"""An object of the API, as JSON."""
Key = tuple[str, str]
"""Namespace and name."""

_TIMEOUT: Final = 15.0
"""Seconds for one answer. The API server itself gives up after 60, when no caller waits any more."""
_PAGE: Final = 500
_CHECKS: Final = 200
_CHECK_EVERY: Final = 0.01
"""Seconds between checks for closed sockets. Only the event loop itself has to run, so a few checks are enough."""


@dataclass(frozen=True, slots=True)
class Kind:
    api_version: str
    name: str
    plural: str
    selector: str = ""
    """Label selector of the objects that the operator watches; empty: all."""

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        root = "/apis" if "/" in self.api_version else "/api"
        scope = ("namespaces", namespace) if namespace is not None else ()
        steps = (quote(step, safe="") for step in (*scope, self.plural, name, subresource) if step)
        return "/".join((root, self.api_version, *steps))


_CHILDREN: Final = f"{names.RELAY_LABEL},{names.MANAGED_BY_LABEL}={names.MANAGED_BY}"
RELAY: Final = Kind(names.API_VERSION, "OutboxRelay", names.RELAY_PLURAL)
SUBSCRIPTION: Final = Kind(names.API_VERSION, "EventSubscription", names.SUBSCRIPTION_PLURAL)
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments", _CHILDREN)
CONFIG_MAP: Final = Kind("v1", "ConfigMap", "configmaps", _CHILDREN)
SERVICE: Final = Kind("v1", "Service", "services", _CHILDREN)
SERVICE_ACCOUNT: Final = Kind("v1", "ServiceAccount", "serviceaccounts", _CHILDREN)
DISRUPTION_BUDGET: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", _CHILDREN)
POD: Final = Kind("v1", "Pod", "pods", names.RELAY_LABEL)
CONSUMER_POD: Final = Kind("v1", "Pod", "pods", names.SUBSCRIPTION_LABEL)
SECRET: Final = Kind("v1", "Secret", "secrets")
EVENT: Final = Kind("events.k8s.io/v1", "Event", "events")
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
MUTATING_WEBHOOK: Final = Kind(
    "admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations"
)
_VERSION: Final = Kind("", "Version", "version")
_GROUPS: Final = Kind("", "APIGroup", "apis")


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects of a kind, and the version of the list."""

    items: tuple[Object, ...]
    resource_version: str


@dataclass(frozen=True, slots=True)
class SecretContent:
    """A Secret as read: its data, and the whole object for a conditional write."""

    data: Mapping[str, bytes]
    object: Object


class ClosableConnections:
    """HTTP connections of one event loop that can be closed reliably, whatever their state.

    Closing a TLS connection waits for the peer's close_notify, which a busy API server may send late. An event loop
    that ends meanwhile leaks the socket. So the sockets are shut down, which completes the close on this side.
    """

    def __init__(self) -> None:
        self._connectors: list[aiohttp.TCPConnector] = []
        self._sockets: list[socket.socket] = []

    def connector(self, context: ssl.SSLContext) -> aiohttp.TCPConnector:
        """Return a connector for one session. Unlimited: every watch occupies one connection."""
        self._connectors = [each for each in self._connectors if not each.closed]
        self._connectors.append(aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=self._socket))
        return self._connectors[-1]

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        self._sockets = [*self._open, socket.socket(family, kind, protocol)]
        return self._sockets[-1]

    @property
    def _open(self) -> list[socket.socket]:
        return [each for each in self._sockets if each.fileno() >= 0]

    async def close(self) -> None:
        """Close all connectors and the remaining sockets. A session without a connector counts as closed."""
        for connector in self._connectors:
            await connector.close()
        for each in self._open:
            with suppress(OSError):  # not connected yet, or already disconnected
                each.shutdown(socket.SHUT_RDWR)
        for _ in range(_CHECKS):
            if not self._open:
                return
            await asyncio.sleep(_CHECK_EVERY)


class Kube:
    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._client = ApiClient(configuration)
        self._connections = ClosableConnections()
        connector = self._connections.connector(self._client.rest_client.ssl_context)
        configuration.client_session_kwargs = {"connector": connector}  # read with the first request
        self._client.user_agent = names.FIELD_MANAGER
        self.on_request: Callable[[str, str, str], None] = lambda verb, plural, code: None
        """Callback for every request: verb, plural, status code (or ``error``)."""

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None) -> Self:
        """Connect with the given kubeconfig, else the pod's service account, else the default kubeconfig."""
        configuration = Configuration()
        try:
            if kubeconfig is not None:
                await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
            else:
                try:
                    config.load_incluster_config(client_configuration=configuration)
                except ConfigException:
                    await config.load_kube_config(client_configuration=configuration)
        except (ConfigException, OSError) as error:
            remedy = "Run inside a pod with a service account, or name a kubeconfig."
            raise NoCluster(f"No cluster to connect to: {error}. {remedy}") from error
        configuration.retries = None  # the work queue retries
        return cls(configuration)

    async def close(self) -> None:
        await self._client.close()
        await self._connections.close()

    async def token(self) -> str | None:
        """Return a fresh bearer token, if the credentials contain one."""
        token = await self.configuration.get_api_key_with_prefix("BearerToken")
        return token.split(" ", 1)[-1] if token else None

    async def server_version(self) -> tuple[int, int]:
        """Return major and minor version of the API server; vendors append a plus sign to the minor version."""
        answer = await self._json("GET", _VERSION, "/version")
        return int(answer["major"]), int("".join(filter(str.isdigit, answer["minor"])) or 0)

    async def is_served(self, kind: Kind) -> bool:
        """Return whether discovery contains the kind. While a CRD is being established, lists work a moment earlier."""
        group = kind.api_version.partition("/")[0]
        groups = await self._json("GET", _GROUPS, "/apis")
        if not any(each["name"] == group for each in groups["groups"]):
            return False
        resources = await self._json("GET", _GROUPS, f"/apis/{kind.api_version}")
        return any(each["name"] == kind.plural for each in resources["resources"])

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._json("GET", kind, kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str | None = None, selector: str = "") -> Listed:
        """List all objects, in pages; ``namespace`` None lists all namespaces."""
        items: list[Object] = []
        query = {"limit": str(_PAGE), **({"labelSelector": selector} if selector else {})}
        while True:
            page = await self._json("GET", kind, kind.path(namespace), query, verb="list")
            metadata = page["metadata"]
            # Items of a list lack apiVersion and kind; a single object needs them.
            items += [{"apiVersion": kind.api_version, "kind": kind.name, **each} for each in page.get("items") or ()]
            if not (token := metadata.get("continue")):
                return Listed(tuple(items), str(metadata["resourceVersion"]))
            query["continue"] = token

    async def apply(self, kind: Kind, body: Object) -> Object:
        """Apply server-side, with force: the operator becomes owner of all fields in ``body``."""
        path = kind.path(body["metadata"].get("namespace"), body["metadata"]["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._json("PATCH", kind, path, query, body, "application/apply-patch+yaml", verb="apply")

    async def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object. With ``dry_run`` the server only validates it and stores nothing."""
        query = {"fieldManager": names.FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        return await self._json("POST", kind, kind.path(body["metadata"].get("namespace")), query, body)

    async def replace(self, kind: Kind, body: Object) -> Object:
        """Replace an object. With a ``resourceVersion`` in the body, raise ``Conflict`` if it was written since."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._json("PUT", kind, path, {"fieldManager": names.FIELD_MANAGER}, body)

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Object, subresource: str | None = None
    ) -> Object:
        """Merge-patch an object: null removes a field, a list replaces a list."""
        path, query = kind.path(namespace, name, subresource), {"fieldManager": names.FIELD_MANAGER}
        return await self._json("PATCH", kind, path, query, body, "application/merge-patch+json")

    async def patch_status(self, kind: Kind, found: Object, status: Object) -> Object:
        """Patch the status of exactly the version that it was computed from, else raise ``Conflict``.

        After a change, the object must be reconciled first; a successor of the same name has a status of its own.
        """
        metadata = found["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": status}
        return await self.patch(kind, metadata["namespace"], metadata["name"], body, "status")

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str | None = None) -> None:
        """Delete an object. With a ``uid``, delete only that object and no successor of the same name."""
        body: Object = {"propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self._json("DELETE", kind, kind.path(namespace, name), None, body)

    async def read_secret(self, namespace: str, name: str) -> SecretContent | None:
        """Read a Secret; None if it does not exist. The API server guarantees valid base64."""
        try:
            secret = await self.get(SECRET, namespace, name)
        except NotFound:
            return None
        data = {key: base64.b64decode(value or "") for key, value in (secret.get("data") or {}).items()}
        return SecretContent(data, secret)

    async def write_secret(
        self, namespace: str, name: str, before: SecretContent | None, data: Mapping[str, bytes]
    ) -> None:
        """Write a Secret. Raises ``Conflict`` if it was written since ``before``."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if before is not None:
            await self.replace(SECRET, {**before.object, "data": encoded})
            return
        metadata = {"name": name, "namespace": namespace, "labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY}}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": encoded}
        await self.create(SECRET, body)

    async def _json(
        self,
        method: str,
        kind: Kind,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        verb: str | None = None,
    ) -> Object:
        verb = verb or method.lower()
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            request = await self._client.param_serialize(
                method, path, query_params=list((query or {}).items()), header_params=headers, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
            response = (await self._client.call_api(*request, _request_timeout=timeout)).response
            text = await response.text()
            if response.status < 300:
                answer: Object = json.loads(text)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            self.on_request(verb, kind.plural, "error")
            raise ApiUnavailable(f"{method} {path}: no answer: {error or type(error).__name__}") from error
        self.on_request(verb, kind.plural, str(response.status))
        if response.status < 300:
            return answer
        raise answer_error(f"{method} {path}", response.status, text, response.headers.get("Retry-After"))
