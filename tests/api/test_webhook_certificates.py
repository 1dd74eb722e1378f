"""Renewal of the webhook's certificates while pods are created: no request fails, and no pod lacks its sidecar."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from prometheus_client import CollectorRegistry

from mailboat_devservers.kubernetes import ApiServer
from mailboat_devservers.kubernetes_certificates import Authority
from mailboat_operator.http_server import serving
from mailboat_operator.kube.client import MUTATING_WEBHOOK, POD, RELAY, Kind, Kube, Object
from mailboat_operator.kube.client import SECRET as SECRET_KIND
from mailboat_operator.kube.errors import Conflict, NotFound
from mailboat_operator.metrics import Metrics
from mailboat_operator.process import run_periodically
from mailboat_operator.relays.signing_keys import SigningKeyRotation
from mailboat_operator.resources.pod import RelayImage
from mailboat_operator.settings import Address
from mailboat_operator.webhook.certificates import CertificateRotation, Certificates, Lifetimes
from mailboat_operator.webhook.server import Webhook
from mailboat_operator.webhook.serving_cert import ServedCertificate, follow, from_secret
from support.operator_processes import IMAGE, RunningOperator, a_pod, a_relay, webhook_configuration
from support.wait import await_until, wait_until

SECRET = "webhook-cert"
SHORT = Lifetimes(certificate=timedelta(seconds=30), settle=timedelta(seconds=5), skew=timedelta(minutes=1))


@pytest_asyncio.fixture
async def kube(api: ApiServer) -> AsyncIterator[Kube]:
    connection = await Kube.connect(api.kubeconfig)
    yield connection
    await connection.close()


@asynccontextmanager
async def replica(kube: Kube, namespace: str, poll_every: float) -> AsyncIterator[str]:
    """Run the webhook of one operator with the certificate in the Secret."""
    served = ServedCertificate()
    hook = Webhook(kube, RelayImage(IMAGE), Metrics(CollectorRegistry()))
    hook.draining = True  # the server closes each connection, so every request needs a handshake
    following = asyncio.create_task(follow(partial(from_secret, kube, namespace, SECRET), served, poll_every))
    try:
        async with serving(hook.application(), Address("127.0.0.1", 0), "--webhook-listen", served.context) as address:
            yield address
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def keeper(kube: Kube, namespace: str) -> CertificateRotation:
    return CertificateRotation(kube, namespace, SECRET, namespace, ("127.0.0.1",), SHORT)


@pytest.mark.verify
async def test_renewals_interrupt_no_client(kube: Kube, namespace: str) -> None:
    """Two replicas are called for every pod. One of them reads the Secret at long intervals."""
    async with replica(kube, namespace, 0.1) as quick, replica(kube, namespace, 2.0) as slow:
        configuration = webhook_configuration(namespace, quick, "Fail")
        (first,) = configuration["webhooks"]
        second = {**first, "name": "slow.mailboat.dev", "clientConfig": {"url": f"https://{slow}/inject"}}
        configuration["webhooks"].append(second)
        await kube.create(MUTATING_WEBHOOK, configuration)
        await kube.create(RELAY, {**a_relay(), "metadata": {"name": "orders", "namespace": namespace}})
        keeping = asyncio.create_task(run_periodically("the certificates", keeper(kube, namespace).rotate, 0.2))
        try:
            begun: bool = await await_until(lambda: is_injecting(kube, namespace), timeout=60, what="an injection")
            assert begun
            trusted, pods = await watch_renewals(kube, namespace)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await kube.delete(MUTATING_WEBHOOK, None, namespace)
    assert pods > 10
    assert {len(bundle) for bundle in trusted} >= {1, 2}, "the old one was never trusted beside the new one, or always"


async def is_injecting(kube: Kube, namespace: str) -> bool:
    return await injected(kube, namespace, "probe") and await injected(kube, namespace, "probe-again")


async def injected(kube: Kube, namespace: str, name: str) -> bool:
    """Create and delete a pod. Return whether the pod got a sidecar."""
    pod = a_pod(name)
    pod["metadata"]["namespace"] = namespace
    try:
        created = await kube.create(POD, pod)
    except Exception as error:  # an error fails the test, except for probes before the first certificate
        if name.startswith("probe"):
            return False
        raise AssertionError(f"{name}: {error}") from error
    await kube.delete(POD, namespace, name)
    return any(each["name"] == "mailboat-relay" for each in created["spec"].get("initContainers", ()))


async def watch_renewals(kube: Kube, namespace: str) -> tuple[set[tuple[x509.Certificate, ...]], int]:
    """Create pods until four certificates were served. Return the bundles in use meanwhile, and the number of pods."""
    served: set[x509.Certificate] = set()
    trusted: set[tuple[x509.Certificate, ...]] = set()
    pods = 0
    while len(served) < 4:
        pods += 1
        assert await injected(kube, namespace, f"pod-{pods}"), f"pod-{pods} has no sidecar"
        content = await kube.read_secret(namespace, SECRET)
        found = Certificates.parse(content.data) if content is not None else None
        assert found is not None
        served.add(found.served.certificate)
        trusted.add(found.trusted)
    return trusted, pods


async def test_the_bundle_is_written_only_when_it_differs(kube: Kube, namespace: str) -> None:
    keep = CertificateRotation(kube, namespace, SECRET, namespace, ("127.0.0.1",))
    configuration = webhook_configuration(namespace, "127.0.0.1:1")
    configuration["webhooks"][0]["failurePolicy"] = "Ignore"
    await kube.create(MUTATING_WEBHOOK, configuration)
    try:
        await keep.rotate()
        first = await kube.get(MUTATING_WEBHOOK, None, namespace)
        await keep.rotate()
        await keep.rotate()
        assert await kube.get(MUTATING_WEBHOOK, None, namespace) == first
        content = await kube.read_secret(namespace, SECRET)
        assert content is not None
        bundle = base64.b64encode(content.data["ca.crt"]).decode()
        assert first["webhooks"][0]["clientConfig"] == {"url": "https://127.0.0.1:1/inject", "caBundle": bundle}

        foreign = {"webhooks": [{**first["webhooks"][0], "clientConfig": {"url": "https://127.0.0.1:1/inject"}}]}
        await kube.patch(MUTATING_WEBHOOK, None, namespace, foreign)
        await keep.rotate()
        corrected = await kube.get(MUTATING_WEBHOOK, None, namespace)
        assert corrected["webhooks"] == first["webhooks"], "the foreign change is reverted, and nothing else changed"
    finally:
        await kube.delete(MUTATING_WEBHOOK, None, namespace)


class Overlapping(Kube):
    """Delays the first writes until every leader has read."""

    expected = 0

    def expect(self, leaders: int) -> None:
        self.expected, self.barrier = leaders, asyncio.Barrier(leaders)

    async def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        await self._meet(kind)
        return await super().create(kind, body, dry_run=dry_run)

    async def replace(self, kind: Kind, body: Object) -> Object:
        await self._meet(kind)
        return await super().replace(kind, body)

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Object, subresource: str | None = None
    ) -> Object:
        await self._meet(kind)
        return await super().patch(kind, namespace, name, body, subresource)

    async def _meet(self, kind: Kind) -> None:
        if self.expected and kind in (SECRET_KIND, MUTATING_WEBHOOK):
            self.expected -= 1
            await self.barrier.wait()


@pytest_asyncio.fixture
async def overlapping(api: ApiServer) -> AsyncIterator[Overlapping]:
    connection = await Overlapping.connect(api.kubeconfig)
    yield connection
    await connection.close()


async def both(look: Callable[[], Awaitable[object]], kube: Overlapping) -> list[BaseException]:
    """Run two rotations whose first writes coincide. Return the errors."""
    kube.expect(2)
    answers = await asyncio.gather(look(), look(), return_exceptions=True)
    return [each for each in answers if isinstance(each, BaseException)]


@pytest.mark.parametrize("before", ["nothing", "something of the past"])
async def test_two_overlapping_leaders_end_with_one_set_of_keys(
    overlapping: Overlapping, namespace: str, before: str
) -> None:
    first = SigningKeyRotation(overlapping, namespace, "keys")
    later = SigningKeyRotation(overlapping, namespace, "keys", now=lambda: datetime.now(UTC) + timedelta(days=400))
    if before != "nothing":
        await first.rotate()
    keeper = first if before == "nothing" else later
    (conflict,) = await both(keeper.rotate, overlapping)
    assert isinstance(conflict, Conflict)
    used = (await keeper.rotate()).data()
    assert (await keeper.rotate()).data() == used
    content = await overlapping.read_secret(namespace, "keys")
    assert content is not None
    assert content.data == used, "what is used is what is written down"


@pytest.mark.parametrize("before", ["nothing", "a certificate of the past"])
async def test_two_leaders_that_overlap_end_with_one_certificate_and_its_bundle(
    overlapping: Overlapping, namespace: str, before: str
) -> None:
    await overlapping.create(MUTATING_WEBHOOK, webhook_configuration(namespace, "127.0.0.1:1"))
    names = ("127.0.0.1",)
    keep = CertificateRotation(overlapping, namespace, SECRET, namespace, names)
    try:
        if before != "nothing":
            await keep.rotate()
            keep = replace(keep, now=lambda: datetime.now(UTC) + timedelta(days=400))
        (conflict,) = await both(keep.rotate, overlapping)
        assert isinstance(conflict, Conflict)
        await keep.rotate()
        content = await overlapping.read_secret(namespace, SECRET)
        assert content is not None
        found = Certificates.parse(content.data)
        assert found is not None
        there = await overlapping.get(MUTATING_WEBHOOK, None, namespace)
        bundle = base64.b64encode(found.bundle_pem()).decode()
        assert there["webhooks"][0]["clientConfig"]["caBundle"] == bundle
        assert len(found.trusted) == 1, "one new certificate, not one per leader"

        # Both leaders write the bundle. One of them fails with a conflict, and has nothing to do in its next rotation.
        webhook = {**there["webhooks"][0], "clientConfig": {"url": "https://127.0.0.1:1/inject"}}
        await overlapping.patch(MUTATING_WEBHOOK, None, namespace, {"webhooks": [webhook]})
        (conflict,) = await both(keep.rotate, overlapping)
        assert isinstance(conflict, Conflict)
        await keep.rotate()
        assert (await overlapping.get(MUTATING_WEBHOOK, None, namespace))["webhooks"] == there["webhooks"]
    finally:
        await overlapping.delete(MUTATING_WEBHOOK, None, namespace)


async def test_certificates_are_made_even_where_nothing_calls_the_webhook_yet(kube: Kube, namespace: str) -> None:
    with pytest.raises(NotFound, match="Install the chart's"):
        await CertificateRotation(kube, namespace, SECRET, "not-there", ("127.0.0.1",)).rotate()
    content = await kube.read_secret(namespace, SECRET)
    assert content is not None
    assert Certificates.parse(content.data) is not None


def test_external_certificates_are_served_and_reloaded_and_the_bundle_is_not_changed(
    api: ApiServer, namespace: str, tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()
    operator = RunningOperator(
        tmp_path, "one", api.kubeconfig, namespace, "--webhook-certs=external", f"--cert-dir={folder}"
    )
    try:
        assert operator.get("/readyz") == (503, "the webhook has no certificate yet\n")
        configuration = webhook_configuration(namespace, operator.address("webhook"), "Fail")
        for number in (1, 2):
            authority = Authority.create()
            pair = authority.for_server("webhook", ["127.0.0.1"])
            (folder / "tls.crt").write_text(pair.certificate)
            (folder / "tls.key").write_text(pair.key)
            configuration["webhooks"][0]["clientConfig"]["caBundle"] = authority.bundle
            api.kubectl("apply", "--filename", "-", input=json.dumps(configuration))
            wait_until(
                lambda: "no OutboxRelay" in create(api, namespace, a_pod("probe", "nobody")),
                timeout=60,
                what=f"an answer with certificate {number}",
            )
        operator.wait_ready()
        there = json.loads(api.kubectl("get", "mutatingwebhookconfiguration", namespace, "--output", "json"))
        assert there["webhooks"][0]["clientConfig"]["caBundle"] == authority.bundle
        assert api.kubectl("get", "secrets", "--namespace", namespace, "--output", "name").split() == [
            "secret/mailboat-signing-keys"
        ]
    finally:
        operator.end()
        api.kubectl("delete", "mutatingwebhookconfiguration", namespace)


def create(api: ApiServer, namespace: str, pod: dict[str, object]) -> str:
    """Create a pod by a dry run and return the warnings or the error."""
    flags = ("create", "--namespace", namespace, "--dry-run=server", "--filename", "-")
    return api.try_kubectl(*flags, input=json.dumps(pod)).err
