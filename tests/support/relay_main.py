"""A relay as a process of its own, for tests that kill it: the production parts, with a clockwork to choose.

What the command line does not offer, on purpose, and tests need: other timings and read limits, and a death by SIGKILL
when the relay passes a named point of its cycle for the n-th time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mailboat.delivery.checkpoints import Checkpoint, Passing, ignore_checkpoint
from mailboat.logs import LogFormat, configure
from mailboat.runtime.manifest_files import load
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import find_secrets
from mailboat.runtime.timings import Timings
from mailboat.store.settings import ReadLimits, RelayIdentity


def dying_at(point: Checkpoint, passage: int, in_the_air: int, answers: int) -> Passing:
    """Dies as a crash would, nothing flushed and nothing said, when ``point`` is passed for the n-th time.

    Passages count only with so many batches handed over and not answered yet, and so many answers, or more.
    """
    left, handed_over, answered = passage, 0, 0

    def passing(passed: Checkpoint) -> None:
        nonlocal left, handed_over, answered
        handed_over += passed is Checkpoint.HANDED_OVER
        # What is sent again after a failure is answered without having been handed over.
        if passed is point and max(handed_over - answered, 0) >= in_the_air and answered >= answers:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        answered += passed is Checkpoint.ANSWERED

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
        passing=dying_at(**{**death, "point": Checkpoint(death["point"])}) if death else ignore_checkpoint,
    )


async def run(orders: Mapping[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await relay(orders).run(stop)


def obey(orders: Mapping[str, Any]) -> NoReturn:
    """All that the process does. It leaves as ``mailboat run`` does: without the exit handlers of C libraries."""
    configure("debug", LogFormat.TEXT)
    asyncio.run(run(orders))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
