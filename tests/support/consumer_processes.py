"""Parts of consumer processes that a test can kill."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from mailboat.consumer.broker.engine import BrokerEngine
from mailboat.consumer.broker.interfaces import BrokerPoint

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "mailboat.consumer.broker.decode",
        "mailboat.consumer.broker.engine",
        "mailboat.consumer.broker.kafka_source",
        "mailboat.consumer.broker.pubsub_source",
        "mailboat.consumer.claims.inbox",
        "mailboat.consumer.claims.redis_store",
        "psycopg",
        "pytest",
        "redis.asyncio",
    ]
)
"""The imports take seconds of CPU time. Each consumer is a fork of a process that has imported them."""
STARTED = "Consumer started"


class Death:
    """Callback that kills this process with SIGKILL at a point of the engine. Implements ``PassingPoint``."""

    def __init__(self, point: str | None, passage: int = 1, *, armed: bool = True) -> None:
        """Kill the process at the passage of that number, if it is ``armed``."""
        self._point = point
        self._left = passage
        self.armed = armed

    def __call__(self, point: BrokerPoint) -> None:
        self.at(point.value)

    def at(self, point: str) -> None:
        if self.armed and point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Lines:
    """File that survives the process: each line is one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, **fields: Any) -> None:
        os.write(self._file, json.dumps({**fields, "pid": os.getpid()}).encode() + b"\n")


def run_until_terminated(engine_of: Callable[[dict[str, Any]], BrokerEngine], orders: dict[str, Any]) -> None:
    """Run the engine of these orders until SIGTERM, in a process of its own."""
    log_to(orders["log"])

    async def until_terminated() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        logging.info(STARTED)
        await engine_of(orders).run(stop)

    asyncio.run(until_terminated())


def log_to(path: str) -> None:
    """Send the log and the errors of this process to a file that several processes share."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 2)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(name)s %(message)s")


def ended(process: Any, timeout: float = 60) -> int | None:
    """Wait for the end of a process and return its exit code, or minus the signal."""
    process.join(timeout)
    code: int | None = process.exitcode
    return code
