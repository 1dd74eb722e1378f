"""Relays of the demo and the benchmark: ``mailboat run`` in a separate process, queried over HTTP."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

from mailboat_devservers.ports import free_port
from mailboat_devservers.processes import Child

MAILBOAT: Final = (sys.executable, "-m", "mailboat.cli.main")
_ANSWER_WITHIN: Final = 1.0


@dataclass(frozen=True, slots=True)
class RelayGlance:
    """Current status of a relay."""

    partitions: int
    owned: tuple[int, ...]
    published: int
    lag: int
    dead: int

    @property
    def owns_all(self) -> bool:
        return 0 < self.partitions == len(self.owned)


class RelayProcess(Child):
    """One relay process. ``launch`` returns before the relay is ready; poll ``glance``."""

    def __init__(self, name: str, manifest: Path, folder: Path) -> None:
        self._status = f"http://127.0.0.1:{(port := free_port())}/status"
        command = [*MAILBOAT, "run", "-f", str(manifest), "--relay-id", name, "--listen", f"127.0.0.1:{port}"]
        super().__init__(name, command, log=folder / f"{name}.log", ready=lambda: True)

    def glance(self) -> RelayGlance | None:
        """Return the status, or None if the relay does not respond: not ready yet, or dead."""
        if not self.running:
            return None
        try:
            with urlopen(self._status, timeout=_ANSWER_WITHIN) as answer:
                (relay,) = json.load(answer)["relays"]
        except (URLError, OSError, HTTPException):  # HTTPException: the relay died during its response
            return None
        return _glance(relay)


def _glance(relay: dict[str, Any]) -> RelayGlance:
    subscriptions = relay["subscriptions"]
    owned = sorted(each["partition"] for subscription in subscriptions for each in subscription["owned"])
    return RelayGlance(
        partitions=sum(subscription["partitions"] for subscription in subscriptions),
        owned=tuple(owned),
        published=sum(subscription["published"] for subscription in subscriptions),
        lag=sum(subscription["lag"] for subscription in subscriptions),
        dead=max((subscription["dead"] for subscription in subscriptions), default=0),
    )
