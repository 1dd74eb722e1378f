"""Watchdog of the event loop: names the handler that blocks it.

A handler that blocks the event loop (``time.sleep``, a synchronous client) delays all other handlers of the process. It
does not affect the group membership or the leases, which are kept by threads.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import Final

from mailboat.consumer.broker.workers import Workers

log = logging.getLogger(__name__)

_BEAT: Final = 0.25


class Watchdog:
    """A thread that expects a beat of the event loop. Logs once per blockage, and again when it is over."""

    def __init__(self, consumer: str, workers: Workers, *, timeout: float = 2.0) -> None:
        self._consumer = consumer
        self._workers = workers
        self._timeout = timeout
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self.blocked: str | None = None
        """Handler that blocks the event loop now."""

    async def run(self) -> None:
        loop_thread = threading.get_ident()
        thread = threading.Thread(target=self._watch, args=(loop_thread,), name="mailboat-watchdog", daemon=True)
        self._beat = time.monotonic()
        thread.start()
        try:
            while True:
                self._beat = time.monotonic()
                await asyncio.sleep(_BEAT)
        finally:
            self._ended.set()

    def _watch(self, loop_thread: int) -> None:
        while not self._ended.wait(_BEAT):
            beat = self._beat
            delay = time.monotonic() - beat
            if delay < self._timeout:
                if self.blocked is not None:
                    log.info("Event loop runs again", extra={"consumer": self._consumer})
                self.blocked = None
            elif self.blocked is None:
                self.blocked = self._workers.current_handler()
                frame = sys._current_frames().get(loop_thread)
                place = "" if frame is None else "".join(traceback.format_stack(frame)[-3:]).rstrip()
                log.warning(
                    "Event loop blocked for %.1f s by %s: use asynchronous calls there, or make the handler a plain"
                    " function, which runs in a thread\n%s",
                    delay,
                    self.blocked,
                    place,
                    extra={"consumer": self._consumer},
                )
