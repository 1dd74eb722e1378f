"""Serving certificate of the webhook: polled from the shared Secret or mounted files, and replaced while it serves.

Every replica polls, including the leader. An unusable certificate is logged, and the previous one is served on. OpenSSL
reads the certificate of a context at the start of each handshake: loading another one into a live context affects new
connections only. Python loads certificates from files only. They are memory files (memfd): no private key is written to
disk, and a read-only root filesystem is no problem.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cryptography import x509

from mailboat_operator.kube.client import Kube
from mailboat_operator.kube.errors import KubeError
from mailboat_operator.webhook.certificates import CERTIFICATE, CERTIFICATE_KEY

log = logging.getLogger(__name__)

POLL_EVERY: Final = 10.0
_POLL_EVERY_AT_START: Final = 0.5
"""Seconds between polls while there is no certificate: the leader may be creating it."""

Pair = tuple[bytes, bytes]
"""Certificate and key, as PEM."""


class CertificateUnusable(ValueError):
    """The certificate can't be served; the previous one stays in use."""


class ServedCertificate:
    """Certificate that the webhook serves. Nothing can be served before the first ``load``."""

    def __init__(self) -> None:
        self.context = _new_context()
        self.ends = 0.0
        """Expiry of the certificate, in seconds since 1970."""
        self._loaded: bytes | None = None

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    def load(self, certificate: bytes, key: bytes) -> bool:
        """Serve this pair from now on. Return False if it is already served. Raises ``CertificateUnusable``."""
        both = certificate + key
        if both == self._loaded:
            return False
        with _as_files(certificate, key) as (certificate_file, key_file):
            try:
                # A mismatched pair would leave the live context without a certificate: try another context first.
                _new_context().load_cert_chain(certificate_file, key_file)
                ends = x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
                self.context.load_cert_chain(certificate_file, key_file)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise CertificateUnusable(f"the certificate can't be served: {error}") from error
        self._loaded, self.ends = both, ends
        return True


async def from_secret(kube: Kube, namespace: str, name: str) -> Pair | None:
    """Read the Secret that the leader maintains; None if there is no certificate yet."""
    content = await kube.read_secret(namespace, name)
    if content is None or not {CERTIFICATE, CERTIFICATE_KEY} <= content.data.keys():
        return None
    return content.data[CERTIFICATE], content.data[CERTIFICATE_KEY]


async def from_folder(folder: Path) -> Pair | None:
    """Read files maintained by others (cert-manager, through a mounted Secret); None if there are none yet."""
    try:
        return (folder / CERTIFICATE).read_bytes(), (folder / CERTIFICATE_KEY).read_bytes()
    except FileNotFoundError:
        return None


async def follow(
    read: Callable[[], Awaitable[Pair | None]], served: ServedCertificate, every: float = POLL_EVERY
) -> None:
    """Poll the source of the certificate and serve what it returns, until cancelled."""
    last_error = ""
    while True:
        try:
            pair = await read()
            if pair is not None and served.load(*pair):
                log.info("Serving certificate loaded")
            last_error = ""
        except (KubeError, CertificateUnusable, OSError) as error:
            if str(error) != last_error:
                consequence = "the previous one stays in use" if served.ready else "there is none to serve"
                log.warning("No new certificate: %s.", consequence, extra={"error": str(error)})
            last_error = str(error)
        await asyncio.sleep(every if served.ready else min(every, _POLL_EVERY_AT_START))


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@contextmanager
def _as_files(*contents: bytes) -> Iterator[list[str]]:
    descriptors = [os.memfd_create("mailboat") for _ in contents]
    try:
        for descriptor, content in zip(descriptors, contents, strict=True):
            os.write(descriptor, content)
        yield [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
