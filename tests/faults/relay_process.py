"""A relay as a process of its own, for tests that kill it: the production parts, with a clockwork to choose.

    python relay_process.py ORDERS.json

What the command line does not offer, on purpose, and tests need: other timings and read limits, and a death by SIGKILL
when the relay passes a named point of its cycle for the n-th time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mailboat.logs import LogFormat, configure
from mailboat.outbox.leases import RelayIdentity
from mailboat.outbox.windows import ReadLimits
from mailboat.pump.points import Passing, Point, unheard
from mailboat.runtime.config import load
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import find_secrets
from mailboat.runtime.session import Timings


def dying_at(point: Point, passage: int) -> Passing:
    """Dies as a crash would, nothing flushed and nothing said, when ``point`` is passed for the n-th time."""
    left = passage

    def passing(passed: Point) -> None:
        nonlocal left
        if passed is point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return passing


def relay(orders: Mapping[str, Any]) -> Relay:
    manifests = load([Path(orders["manifests"])])
    death = orders.get("die_at")
    return Relay(
        manifests.relays[0],
        manifests.subscriptions,
        secrets=find_secrets(None, os.environ),
        identity=RelayIdentity(orders["relay"], str(uuid.uuid4())),
        timings=Timings(**orders["timings"]) if orders.get("timings") else None,
        limits=ReadLimits(**orders["limits"]) if orders.get("limits") else None,
        passing=dying_at(Point(death["point"]), death["passage"]) if death else unheard,
    )


async def run(orders: Mapping[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await relay(orders).run(stop)


if __name__ == "__main__":
    configure("debug", LogFormat.TEXT)
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))
