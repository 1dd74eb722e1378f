"""Where an operator's serving certificate comes from, looked at again and again: the shared Secret, or mounted files.

Every replica does this, the leader too. What can't be used is told, and what was served before goes on.
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
"""Seconds between looks while there is nothing to serve: the leader may be making it at this moment."""

Pair = tuple[bytes, bytes]
Source = Callable[[], Awaitable[Pair | None]]
"""Certificate and key, as PEM; None: not there yet."""


def from_secret(kube: Kube, namespace: str, name: str) -> Source:
    """The Secret that the leader keeps."""

    async def read() -> Pair | None:
        content = await read_secret(kube, namespace, name)
        if content is None or not {CERTIFICATE, CERTIFICATE_KEY} <= content.data.keys():
            return None
        return content.data[CERTIFICATE], content.data[CERTIFICATE_KEY]

    return read


def from_folder(folder: Path) -> Source:
    """Files that somebody else keeps (cert-manager, through a mounted Secret)."""

    async def read() -> Pair | None:
        try:
            return (folder / CERTIFICATE).read_bytes(), (folder / CERTIFICATE_KEY).read_bytes()
        except FileNotFoundError:
            return None

    return read


async def follow(source: Source, served: ServedCertificate, every: float = LOOK_EVERY) -> None:
    """Serve what the source has, for ever."""
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
