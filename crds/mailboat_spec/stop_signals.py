"""Stop of a running process by SIGTERM or SIGINT, for the relay and the operator."""

import asyncio
import logging
import os
import signal
import sys
from typing import Any


def stop_on_signals(stop: asyncio.Event, log: logging.Logger, **fields: Any) -> None:
    """Set ``stop`` at the first signal. Exit at the second one, with 128 + its number. Log both with ``fields``."""
    loop = asyncio.get_running_loop()

    def received(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("Second signal, exiting at once", extra={"signal": number.name, **fields})
            sys.stderr.flush()
            os._exit(128 + number)
        log.info("Stopping; a second signal exits at once", extra={"signal": number.name, **fields})
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
