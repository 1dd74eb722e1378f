"""Order of start and shutdown of one operator process, whose states are in the docstring of ``mailboat_operator``.

If leadership is lost, the core is ended at once, by force if necessary, since another operator may already be active.
"""

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry

from mailboat_operator.controller.controller import ControllerSettings, run_controller
from mailboat_operator.http_server import health_application, serving
from mailboat_operator.kube.client import Kube
from mailboat_operator.kube.errors import KubeError
from mailboat_operator.leader_election import Election, Timing
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.signing_keys import Signer, SigningKeyRotation
from mailboat_operator.resources.pod import RelayImage
from mailboat_operator.settings import Settings
from mailboat_operator.webhook.certificates import CertificateRotation
from mailboat_operator.webhook.server import Webhook
from mailboat_operator.webhook.serving_cert import ServedCertificate, follow, from_folder, from_secret
from mailboat_spec.stop_signals import stop_on_signals

log = logging.getLogger(__name__)

EXIT_LOST: Final = 1
_END_BY_FORCE_AFTER: Final = 1 / 5
"""Fraction of the Lease's duration for the core to end in after losing the lead. Others wait for a third of it."""
_END_IN_ORDER_WITHIN: Final = 10.0
ROTATE_EVERY: Final = 30.0
_RETRY_AFTER: Final = 1.0


class Operator:
    """One operator process. Call ``run`` once."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._registry = registry
        self._image = RelayImage(settings.relay_image, settings.relay_image_pull_policy)
        self._served = ServedCertificate()
        self._metrics = Metrics(registry)
        self._metrics.certificate_ends.set_function(lambda: self._served.ends)
        self._stopping = False

    async def run(self) -> None:
        """Run until a stop signal. Raise the error that ended it otherwise, such as ``LeadershipLost``."""
        stop = asyncio.Event()
        stop_on_signals(stop, log)
        settings = self._settings
        async with AsyncExitStack() as opened:
            kube = await Kube.connect(settings.kubeconfig)
            opened.push_async_callback(kube.close)
            hook = Webhook(kube, self._image, self._metrics, settings.namespaces)
            # Unique per process, even if pod names are reused.
            identity = f"{settings.identity or socket.gethostname()}_{secrets.token_hex(4)}"
            timing = Timing.of(settings.lease_duration.seconds)
            election = Election(kube, settings.operator_namespace, settings.lease_name, identity, timing)
            health = health_application(self._not_ready, self._registry)
            server = serving(health, settings.health_listen, "--health-listen")
            addresses = {"health": await opened.enter_async_context(server)}
            tasks: list[asyncio.Task[None]] = []
            if settings.webhook_certs != "off":
                application = hook.application()
                server = serving(application, settings.webhook_listen, "--webhook-listen", self._served.context)
                addresses["webhook"] = await opened.enter_async_context(server)
                if settings.cert_dir is not None:
                    read = partial(from_folder, settings.cert_dir)
                else:
                    read = partial(from_secret, kube, settings.operator_namespace, settings.webhook_secret)
                tasks.append(asyncio.create_task(follow(read, self._served), name="certificate"))
            log.info("Listening.", extra={**addresses, "identity": identity})
            tasks.append(asyncio.create_task(self._lead(kube, election), name="leading"))
            stopped = asyncio.create_task(stop.wait(), name="stop")
            try:
                ended, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                self._stopping = hook.draining = True
                stop.set()
                # Stop the leader's work, then release the Lease. The certificate is still followed, for the webhook.
                tasks[-1].cancel()
                await asyncio.gather(tasks[-1], return_exceptions=True)
                await election.release()
                for task in ended - {stopped}:
                    task.result()  # raises the error that ended it, if any
                if settings.webhook_certs != "off":
                    await asyncio.sleep(settings.shutdown_delay.seconds)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        log.info("Stopped.")

    def _not_ready(self) -> str | None:
        if self._stopping:
            return "stopping"
        if self._settings.webhook_certs != "off" and not self._served.ready:
            return "the webhook has no certificate yet"
        return None

    async def _lead(self, kube: Kube, election: Election) -> None:
        """Acquire leadership and lead until it is lost or the core ends."""
        settings, namespace = self._settings, self._settings.operator_namespace
        await election.acquire()
        keys = SigningKeyRotation(kube, namespace, settings.signing_secret)
        renewal = asyncio.create_task(election.hold(), name="hold the lead")
        work = [renewal, asyncio.create_task(self._work(kube, keys), name="work")]
        if settings.webhook_certs == "self":
            secret, config = settings.webhook_secret, settings.webhook_config_name
            rotation = CertificateRotation(kube, namespace, secret, config, settings.certificate_names)
            work.append(asyncio.create_task(run_periodically("the webhook's certificates", rotation.rotate)))
        by_force_after = settings.lease_duration.seconds * _END_BY_FORCE_AFTER
        try:
            ended, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            lost = renewal.done() and not renewal.cancelled() and renewal.exception() is not None
            within = by_force_after if lost else min(_END_IN_ORDER_WITHIN, election.time_left)
            _, pending = await asyncio.wait(work, timeout=within)
            if pending:
                # The remaining tasks may still write. The Lease must not be released, nor acquired by others, while
                # they run.
                names = [task.get_name() for task in pending]
                log.critical("Tasks did not stop, process killed", extra={"tasks": names})
                sys.stderr.flush()
                os._exit(EXIT_LOST)
        for task in ended:
            task.result()

    async def _work(self, kube: Kube, keys: SigningKeyRotation) -> None:
        signer: Signer | None = None
        while signer is None:
            try:
                signer = Signer(await keys.rotate())
            except KubeError as error:
                log.warning("Signing keys unavailable, retrying", extra={"error": str(error)})
                await asyncio.sleep(1)

        async def rotate() -> None:
            signer.ring = await keys.rotate()

        # Signing keys need maintenance to stay usable, so neither task runs without the other.
        async with asyncio.TaskGroup() as tasks:
            settings = ControllerSettings(
                image=self._image,
                namespaces=self._settings.namespaces,
                instance=self._settings.identity or socket.gethostname(),
                status_interval=self._settings.status_interval.seconds,
            )
            tasks.create_task(run_controller(kube, settings, signer, self._metrics), name="core")
            tasks.create_task(run_periodically("the signing keys", rotate), name="signing keys")


async def run_periodically(subject: str, rotate: Callable[[], Awaitable[None]], every: float = ROTATE_EVERY) -> None:
    """Run ``rotate`` periodically until cancelled. Log the same error once, and retry with growing back-off."""
    last_error, failures = "", 0
    while True:
        try:
            await rotate()
            last_error, failures, pause = "", 0, every
        except KubeError as error:
            if str(error) != last_error:
                log.warning("Rotation of %s failed, retrying", subject, extra={"error": str(error)})
            last_error, failures = str(error), min(failures + 1, 10)
            pause = min(every, max(error.retry_after or 0, _RETRY_AFTER * 2 ** (failures - 1)))
        await asyncio.sleep(pause)
