"""Injection webhook over HTTPS: AdmissionReview in, AdmissionReview out. Every replica serves it.

The answer is always "allowed": a pod without a relay is better than a pod that can't start. Every failure becomes a
warning to the creator of the pod, a log line and a count. Each request reads the relay and its subscriptions from the
API, since only the leader has watches.

A request needs no credentials, so its cost is bounded: the size of a body, the bytes of all bodies that are read,
parsed and answered concurrently, and the lists of subscriptions in memory. Requests beyond these bounds wait, or are
refused with 413, 408 or 503.
"""

import asyncio
import base64
import json
import logging
import re
from collections.abc import Collection
from typing import Any, Final

from aiohttp import web

from mailboat_operator.http_server import Busy, Memory
from mailboat_operator.kube.client import DEPLOYMENT, RELAY, SUBSCRIPTION, Kube, Object
from mailboat_operator.kube.errors import ApiUnavailable, Invalid, KubeError, NotFound, Throttled
from mailboat_operator.metrics import Metrics
from mailboat_operator.resources.pod import RelayImage
from mailboat_operator.webhook import injection
from mailboat_operator.webhook.injection import Injection, Outcome, Sidecar, inject, left_out, requested_relay

log = logging.getLogger(__name__)

PATH: Final = "/inject"
NATIVE_SIDECARS: Final = (1, 29)
"""First version of Kubernetes with native sidecars enabled by default."""
_LARGEST: Final = 2 * 1024 * 1024
"""Maximum bytes of a review. It holds one pod, whose JSON is little longer than its form in etcd (at most 1.5 MiB)."""
_MEMORY: Final = 3 * 1024 * 1024
"""Bytes of all concurrent reviews: 72 MiB when parsed, at worst."""
_LEAST: Final = 256 * 1024
"""Minimum bytes reserved per review, which bounds the number of concurrent reviews to 12."""
_MAX_WAITERS: Final = 64
_LISTS: Final = 2
"""Concurrent lists of subscriptions: one of 2,000 takes some 40 MiB."""
_SHARE: Final = 0.6
"""Share of the API server's webhook timeout for reads from it. After the timeout it continues without an answer."""
_ANSWER_WITHIN: Final = 3.0
"""Seconds, if the request carries no timeout."""
_RETRY_AFTER: Final = 0.2
"""Seconds until a failed read from the API server is retried."""
_LONGEST: Final = 30
"""Seconds: the maximum timeout of any webhook in Kubernetes."""
_MAX_ACCEPTED: Final = 1000
"""Number of sidecar variants remembered as accepted."""


class Webhook:
    """Request handling of the webhook, without a socket."""

    def __init__(self, kube: Kube, image: RelayImage, metrics: Metrics, namespaces: Collection[str] = ()) -> None:
        self._kube = kube
        self._image = image
        self._metrics = metrics
        for outcome in Outcome:
            metrics.injections.labels(outcome.value)
        self._namespaces = namespaces
        self._version: tuple[int, int] | None = None
        self._accepted: set[str] = set()
        self._memory = Memory(_MEMORY, _MAX_WAITERS)
        self._lists = asyncio.Semaphore(_LISTS)
        self.draining = False
        """Continue to answer, but close each connection afterwards: the next request goes to another replica."""

    def application(self) -> web.Application:
        application = web.Application(client_max_size=_LARGEST)
        application.add_routes([web.post(PATH, self._review)])
        return application

    async def _review(self, request: web.Request) -> web.Response:
        clock = asyncio.get_running_loop().time
        until = clock() + answer_timeout(request.query.get("timeout"))
        size = request.content_length or _LARGEST
        if size > _LARGEST:
            raise web.HTTPRequestEntityTooLarge(_LARGEST, size)
        try:
            async with asyncio.timeout_at(until) as timeout, self._memory.reserved(max(size, _LEAST)):
                body = await request.read()
                timeout.reschedule(None)
                return await self._reviewed(body, until - clock())
        except Busy:
            raise web.HTTPServiceUnavailable(text="Too many reviews wait already.\n") from None
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="The review did not arrive in time, or waited too long.\n") from None

    async def _reviewed(self, body: bytes, within: float) -> web.Response:
        try:
            request = json.loads(body)["request"]
            uid = request["uid"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise web.HTTPBadRequest(text="This is no AdmissionReview with a request.\n") from None
        with self._metrics.injection_seconds.time():
            answer = await self.answer(request, within)
        self._metrics.injections.labels(answer.outcome.value).inc()
        response = web.json_response(_review_of(uid, answer))
        if self.draining:
            response.force_close()
        return response

    async def answer(self, request: Object, within: float = _ANSWER_WITHIN) -> Injection:
        """Return the injection for one pod. Never raises."""
        context = {"namespace": request.get("namespace"), "uid": request.get("uid")}
        try:
            async with asyncio.timeout(within):
                answer = await self._answer_with_retry(request)
        except Exception as error:
            log.exception("Webhook failed, pod starts without its relay", extra=context)
            reason = "the API server did not answer in time" if isinstance(error, TimeoutError) else "an error"
            problem = f"the relay could not be added ({reason}; the operator's log says more). Restart the pod"
            return left_out(problem, outcome=Outcome.FAILED)
        if answer.warnings:
            log.info("Injection: %s.", answer.outcome, extra={**context, "warnings": answer.warnings})
        return answer

    async def _answer_with_retry(self, request: Object) -> Injection:
        """Retry while the API server is unavailable: a short outage must not cost a pod its relay."""
        while True:
            try:
                return await self._answer(request)
            except (ApiUnavailable, Throttled) as error:
                log.info("Review of a pod retried", extra={"error": str(error)})
                await asyncio.sleep(_RETRY_AFTER)

    async def _answer(self, request: Object) -> Injection:
        pod: Any = request.get("object")
        is_creation = request.get("operation") == "CREATE" and not request.get("subResource") and isinstance(pod, dict)
        if not is_creation or (name := requested_relay(pod)) is None:
            return Injection(Outcome.NOT_ASKED)
        namespace = str(request["namespace"])
        if self._namespaces and namespace not in self._namespaces:
            return left_out(f"the operator does not watch namespace {namespace}. Add it to --namespace")
        if self._version is None:
            self._version = await self._kube.server_version()
        if self._version < NATIVE_SIDECARS:
            # Without native sidecars, an init container that never ends would block the application.
            return left_out("sidecars need Kubernetes 1.29 or newer: set runtime: Deployment on the OutboxRelay")
        try:
            relay = await self._kube.get(RELAY, namespace, name)
        except NotFound:
            return inject(pod, namespace, None, (), self._image)
        async with self._lists:
            answer = inject(pod, namespace, relay, (await self._kube.list(SUBSCRIPTION, namespace)).items, self._image)
        if answer.sidecar is not None and (reason := await self._dry_run_error(answer.sidecar, namespace)):
            return left_out(
                f'the template of OutboxRelay "{name}" is invalid: correct it and restart the pod: {reason}'
            )
        return answer

    async def _dry_run_error(self, sidecar: Sidecar, namespace: str) -> str | None:
        """Return why the API server would refuse a pod with this sidecar. One dry run per sidecar variant."""
        if sidecar.mark in self._accepted:
            return None
        try:
            await self._kube.create(DEPLOYMENT, injection.trial(sidecar, namespace), dry_run=True)
        except KubeError as error:
            if isinstance(error, Invalid) and (reason := injection.sidecar_error(str(error))) is not None:
                log.info("Sidecar refused by the API server in a dry run", extra={"error": str(error)})
                return reason
            log.warning("Dry run of a sidecar failed, sidecar injected", extra={"error": str(error)})
            return None
        if len(self._accepted) >= _MAX_ACCEPTED:
            self._accepted.clear()
        self._accepted.add(sidecar.mark)
        return None


def answer_timeout(given: str | None) -> float:
    """Return the time limit for an answer. ``given``: timeout sent by the API server, such as ``10s``."""
    seconds = re.fullmatch(r"(\d{1,2})s", given or "")
    return _SHARE * min(int(seconds[1]), _LONGEST) if seconds else _ANSWER_WITHIN


def _review_of(uid: str, answer: Injection) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(answer.patch).encode()).decode()
    if answer.warnings:
        response["warnings"] = list(answer.warnings)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
