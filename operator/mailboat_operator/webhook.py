"""The injection webhook over HTTPS: AdmissionReview in, AdmissionReview out. Every replica serves it.

The answer is always "allowed": a pod that could have had a relay is worth more than one that could not start. Whatever
goes wrong becomes a warning to whoever creates the pod, a line in the log and a count. Each request reads the relay and
its subscriptions from the API (no replica but the leader watches anything) and changes nothing, so that a dry run is no
different from any other.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import ssl
from collections.abc import Collection
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mailboat_operator.injection import (
    Injection,
    Outcome,
    Sidecar,
    failed,
    inject,
    left_out,
    objection,
    trial,
    wanted_relay,
)
from mailboat_operator.kube import (
    DEPLOYMENT,
    RELAY,
    SUBSCRIPTION,
    ApiUnavailable,
    Invalid,
    Kube,
    KubeError,
    NotFound,
    Object,
    Throttled,
)
from mailboat_operator.podspec import RelayImage
from mailboat_operator.settings import Address

log = logging.getLogger(__name__)

PATH: Final = "/inject"
NATIVE_SIDECARS: Final = (1, 29)
"""The first version of Kubernetes that has them without being asked to."""
_LARGEST: Final = 8 * 1024 * 1024
"""Bytes. The API server takes objects of up to 3 MiB, and a review may hold two."""
_SHARE: Final = 0.6
"""Of the time that the API server waits: for reading from it. Beyond that time it goes on without an answer."""
_ANSWER_WITHIN: Final = 3.0
"""Seconds, where it does not say how long it waits."""
_AGAIN_AFTER: Final = 0.2
"""Seconds until the API server is asked again, after it did not answer as it should."""
_KEPT_OPEN: Final = 120
"""Seconds for which a connection without a request is kept. The API server itself ends it after 90: a review that is
sent just as we end it would be lost, and the pod would start without its relay."""
_CLOSE_WITHIN: Final = 3.0
_REMEMBERED: Final = 1000
"""Kinds of sidecars that are known to be acceptable."""


class InjectionMetrics:
    """How often, how it ended, how long it took; and how long the certificate lasts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "mailboat_operator_injections", "Pods that the webhook was asked about.", ["outcome"], registry=registry
        )
        self.seconds = Histogram(
            "mailboat_operator_injection_seconds", "Time to an answer of the webhook.", registry=registry
        )
        self.certificate_ends = Gauge(
            "mailboat_operator_certificate_expiry_timestamp_seconds",
            "When the certificate that this replica serves ends; 0 while it has none.",
            registry=registry,
        )
        for outcome in Outcome:
            self.requests.labels(outcome.value)


class Webhook:
    """The answers, without a socket."""

    def __init__(
        self, kube: Kube, image: RelayImage, metrics: InjectionMetrics, namespaces: Collection[str] = ()
    ) -> None:
        self._kube = kube
        self._image = image
        self._metrics = metrics
        self._namespaces = namespaces
        self._version: tuple[int, int] | None = None
        self._accepted: set[str] = set()
        self.leaving = False
        """Answers go on, but ask to be the last on their connection: the next request goes to another replica."""

    def application(self) -> web.Application:
        application = web.Application(client_max_size=_LARGEST)
        application.router.add_post(PATH, self._review)
        return application

    async def _review(self, request: web.Request) -> web.Response:
        try:
            review = json.loads(await request.read())  # aiohttp answers 413 beyond the limit
            asked = review["request"]
            uid = asked["uid"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return web.Response(text="This is no AdmissionReview with a request.\n", status=400)
        with self._metrics.seconds.time():
            answer = await self.answer(asked, time_to_answer(request.query.get("timeout")))
        self._metrics.requests.labels(answer.outcome.value).inc()
        response = web.json_response(_reviewed(uid, answer))
        if self.leaving:
            response.force_close()
        return response

    async def answer(self, asked: Object, within: float = _ANSWER_WITHIN) -> Injection:
        """What becomes of one pod. Never raises."""
        where = {"namespace": asked.get("namespace"), "uid": asked.get("uid")}
        try:
            async with asyncio.timeout(within):
                answer = await self._answer_at_last(asked)
        except Exception as error:
            log.exception("A pod starts without its relay: the webhook failed.", extra=where)
            reason = "the API server did not answer in time" if isinstance(error, TimeoutError) else "an error"
            return failed(f"the relay could not be added ({reason}; the operator's log says more). Restart the pod")
        if answer.warnings:
            log.info("Injection: %s.", answer.outcome, extra={**where, "warnings": answer.warnings})
        return answer

    async def _answer_at_last(self, asked: Object) -> Injection:
        """However often it takes: a moment without an API server must not cost a pod its relay."""
        while True:
            try:
                return await self._answer(asked)
            except (ApiUnavailable, Throttled) as error:
                log.info("The API server is asked again about a pod.", extra={"error": str(error)})
                await asyncio.sleep(_AGAIN_AFTER)

    async def _answer(self, asked: Object) -> Injection:
        pod = asked.get("object")
        if asked.get("operation") != "CREATE" or not isinstance(pod, dict) or asked.get("subResource"):
            return Injection(Outcome.NOT_ASKED)
        name = wanted_relay(pod)
        if name is None:
            return Injection(Outcome.NOT_ASKED)
        namespace = str(asked["namespace"])
        if self._namespaces and namespace not in self._namespaces:
            return left_out(f"the operator does not look after namespace {namespace}. Add it to --namespace")
        if self._version is None:
            self._version = await self._kube.server_version()
        if self._version < NATIVE_SIDECARS:
            # An init container that stays, but is not known to stay, would keep the application waiting for ever.
            return left_out("sidecars need Kubernetes 1.29 or newer: set runtime: Deployment on the OutboxRelay")
        try:
            relay = await self._kube.get(RELAY, namespace, name)
        except NotFound:
            return inject(pod, namespace, None, (), self._image)
        subscriptions = await self._kube.list(SUBSCRIPTION, namespace)
        answer = inject(pod, namespace, relay, subscriptions.items, self._image)
        if answer.sidecar is not None and (reason := await self._objection(answer.sidecar, namespace)):
            return left_out(f'the template of OutboxRelay "{name}" is invalid, mend it and restart the pod: {reason}')
        return answer

    async def _objection(self, sidecar: Sidecar, namespace: str) -> str | None:
        """Why the API server would refuse a pod with this sidecar. Asked once per kind of sidecar, by a dry run."""
        if sidecar.mark in self._accepted:
            return None
        try:
            await self._kube.create(DEPLOYMENT, trial(sidecar, namespace), dry_run=True)
        except KubeError as error:
            if isinstance(error, Invalid) and (reason := objection(str(error))) is not None:
                log.info("The API server would refuse a sidecar.", extra={"error": str(error)})
                return reason
            log.warning("A sidecar could not be tried; it is added all the same.", extra={"error": str(error)})
            return None
        if len(self._accepted) >= _REMEMBERED:
            self._accepted.clear()
        self._accepted.add(sidecar.mark)
        return None


def time_to_answer(given: str | None) -> float:
    """``given``: what the API server says with each request, such as ``10s``."""
    seconds = re.fullmatch(r"(\d{1,2})s", given or "")
    return _SHARE * int(seconds[1]) if seconds else _ANSWER_WITHIN


def _reviewed(uid: str, answer: Injection) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(answer.patch).encode()).decode()
    if answer.warnings:
        response["warnings"] = list(answer.warnings)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


class HttpServer:
    """An application on a socket, plain or with TLS."""

    def __init__(self, application: web.Application) -> None:
        # No access log: probes and pods come every few seconds.
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_CLOSE_WITHIN,
            keepalive_timeout=_KEPT_OPEN,
        )

    async def start(self, address: Address, context: ssl.SSLContext | None = None) -> Address:
        """The address with the port that was given out. Raises ``OSError``."""
        await self._runner.setup()
        await web.TCPSite(self._runner, address.host, address.port, ssl_context=context).start()
        host, port, *_ = self._runner.addresses[0]
        return Address(str(host), int(port))

    async def close(self) -> None:
        await self._runner.cleanup()
