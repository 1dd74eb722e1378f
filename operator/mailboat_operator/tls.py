"""A TLS context whose certificate can be changed while it serves.

OpenSSL takes the certificate of a context at the beginning of each handshake: loading another one into a live context
changes new connections and leaves the others alone. Python loads certificates from files only; where the system has
memory files, no private key ever touches a disk, and a read-only root is no obstacle.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography import x509


class CertificateUnusable(ValueError):
    """The certificate can't be served; the one before it goes on."""


class ServedCertificate:
    """What the webhook serves. Nothing can be served before the first ``load``."""

    def __init__(self) -> None:
        self.context = _new_context()
        self.ends = 0.0
        """When it ends, in seconds since 1970."""
        self._loaded: bytes | None = None

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    def load(self, certificate: bytes, key: bytes) -> bool:
        """Serve these from now on. False: they are the ones already. Raises ``CertificateUnusable``."""
        both = certificate + key
        if both == self._loaded:
            return False
        with _as_files(certificate, key) as (certificate_file, key_file):
            try:
                # A pair that does not fit would leave the live context without any: try it elsewhere first.
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
