"""Serving certificate of an operator, polled from its source: the shared Secret, or mounted files.

Every replica polls, including the leader. An unusable certificate is logged, and the previous one is served on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from mailboat_operator.certificates import CERTIFICATE, CERTIFICATE_KEY
from mailboat_operator.housekeeping import read_secret
from mailboat_operator.kube import Kube, KubeError
from mailboat_operator.tls import CertificateUnusable, ServedCertificate

log = logging.getLogger(__name__)

LOOK_EVERY: Final = 10.0
_LOOK_AT_FIRST: Final = 0.5
"""Seconds between polls while there is no certificate: the leader may be creating it."""

Pair = tuple[bytes, bytes]
Source = Callable[[], Awaitable[Pair | None]]
"""Certificate and key, as PEM; None if they do not exist yet."""


def from_secret(kube: Kube, namespace: str, name: str) -> Source:
    """Read the Secret that the leader maintains."""

    async def read() -> Pair | None:
        content = await read_secret(kube, namespace, name)
        if content is None or not {CERTIFICATE, CERTIFICATE_KEY} <= content.data.keys():
            return None
        return content.data[CERTIFICATE], content.data[CERTIFICATE_KEY]

    return read


def from_folder(folder: Path) -> Source:
    """Read files maintained by others (cert-manager, through a mounted Secret)."""

    async def read() -> Pair | None:
        try:
            return (folder / CERTIFICATE).read_bytes(), (folder / CERTIFICATE_KEY).read_bytes()
        except FileNotFoundError:
            return None

    return read


async def follow(source: Source, served: ServedCertificate, every: float = LOOK_EVERY) -> None:
    """Poll the source and serve its certificate, until cancelled."""
    complaint = ""
    while True:
        try:
            pair = await source()
            if pair is not None and served.load(*pair):
                log.info("Serving a new certificate.")
            complaint = ""
        except (KubeError, CertificateUnusable, OSError) as error:
            if str(error) != complaint:
                goes_on = "the one before goes on" if served.ready else "there is none to serve"
                log.warning("No new certificate: %s.", goes_on, extra={"error": str(error)})
            complaint = str(error)
        await asyncio.sleep(every if served.ready else min(every, _LOOK_AT_FIRST))
