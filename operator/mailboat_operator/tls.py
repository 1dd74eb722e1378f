"""TLS context whose certificate can be replaced while it serves.

OpenSSL reads the certificate of a context at the start of each handshake: loading another one into a live context
affects new connections only. Python loads certificates from files only. If the system has memory files (memfd), no
private key is written to disk, and a read-only root filesystem is no obstacle.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography import x509


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


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@contextmanager
def _as_files(*contents: bytes) -> Iterator[tuple[str, ...]]:
    files = [_file(content) for content in contents]
    try:
        yield tuple(name for _, name in files)
    finally:
        for descriptor, name in files:
            os.close(descriptor)
            if not name.startswith("/proc/"):
                os.unlink(name)


def _file(content: bytes) -> tuple[int, str]:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("mailboat")
        name = f"/proc/self/fd/{descriptor}"
    else:
        descriptor, name = tempfile.mkstemp(prefix="mailboat-")
    os.write(descriptor, content)
    return descriptor, name
