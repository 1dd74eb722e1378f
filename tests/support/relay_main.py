"""Relay process for tests that kill it: the production parts, with settings that the command line does not offer.

These are timings, read limits, and a SIGKILL at the n-th passage of a checkpoint.
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

from mailboat.delivery.stream import Checkpoint, CheckpointHook, ignore_checkpoint
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.manifest_files import load
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import find_secrets
from mailboat.runtime.timings import Timings
from mailboat.store.settings import ReadLimits, RelayIdentity
from mailboat_spec.structured_logs import LogFormat, configure


def dying_at(point: Checkpoint, passage: int, in_the_air: int, answers: int) -> CheckpointHook:
    """Kill the process, without a flush or a log message, at the n-th passage of ``point``.

    A passage counts only with at least ``in_the_air`` unanswered batches and at least ``answers`` answered ones.
    """
    left, handed_over, answered = passage, 0, 0

    def on_checkpoint(passed: Checkpoint) -> None:
        nonlocal left, handed_over, answered
        handed_over += passed is Checkpoint.HANDED_OVER
        # A retry after a failure has an answer without a hand-over.
        if passed is point and max(handed_over - answered, 0) >= in_the_air and answered >= answers:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        answered += passed is Checkpoint.ANSWERED

    return on_checkpoint


def relay(orders: Mapping[str, Any]) -> Relay:
    manifests = load([Path(orders["manifests"])])
    death = orders.get("die_at")
    return Relay(
        Configuration(manifests.relays[0], manifests.subscriptions),
        secrets=find_secrets(None, os.environ),
        identity=RelayIdentity(orders["relay"], str(uuid.uuid4())),
        timings=Timings(**orders["timings"]) if orders.get("timings") else None,
        limits=ReadLimits(**orders["limits"]) if orders.get("limits") else None,
        on_checkpoint=dying_at(**{**death, "point": Checkpoint(death["point"])}) if death else ignore_checkpoint,
    )


async def run(orders: Mapping[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await relay(orders).run(stop)


def run_relay(orders: Mapping[str, Any]) -> NoReturn:
    """Run the relay and end the process like ``mailboat run``, without the exit handlers of C libraries."""
    configure("mailboat", "debug", LogFormat.TEXT)
    asyncio.run(run(orders))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
