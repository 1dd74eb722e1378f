"""A thread that renews the leases of running events and runs periodic checks.

A thread, because a handler that blocks the event loop must not lose its claims.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from mailboat.consumer.broker.interfaces import ClaimsUnavailable

log = logging.getLogger(__name__)

_AGAIN: Final = 1.0
"""Seconds until the next try while the store is unavailable."""


class Renewal:
    """Holds the ids of claimed events and calls ``renew`` with them every third of a lease; ``check`` now and then.

    ``renew`` returns the ids whose claims are lost. Both callables run in the thread and may raise ClaimsUnavailable.
    """

    def __init__(
        self,
        renew: Callable[[Sequence[str]], Sequence[str]],
        *,
        lease: float,
        check: Callable[[], None] | None = None,
        check_every: float = 60.0,
    ) -> None:
        self._renew = renew
        self._check = check
        self._every = lease / 3
        self._check_every = check_every
        self._held: dict[str, None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="mailboat-claims", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. May wait for a call in flight."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def hold(self, event_ids: Sequence[str]) -> None:
        with self._lock:
            self._held.update(dict.fromkeys(event_ids))

    def drop(self, event_ids: Sequence[str]) -> None:
        with self._lock:
            for event_id in event_ids:
                self._held.pop(event_id, None)

    def holds(self, event_id: str) -> bool:
        return event_id in self._held

    def among(self, event_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are held."""
        with self._lock:
            return self._held.keys() & event_ids

    def held(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def _run(self) -> None:
        checked = time.monotonic()
        pause = self._every
        unavailable = False
        while not self._stop.wait(pause):
            started = time.monotonic()
            try:
                self._renew_all()
                if self._check is not None and started - checked >= self._check_every:
                    checked = started
                    self._check()
                pause = max(0.0, self._every - (time.monotonic() - started))
                unavailable = False
            except ClaimsUnavailable as error:
                level = logging.DEBUG if unavailable else logging.WARNING  # one warning per outage
                log.log(level, "Leases can't be renewed", extra={"error": str(error), "events": len(self._held)})
                unavailable = True
                pause = min(self._every, _AGAIN)
            except Exception:
                log.exception("Renewal of leases failed")
                pause = min(self._every, _AGAIN)

    def _renew_all(self) -> None:
        held = self.held()
        if not held:
            return
        lost = [event_id for event_id in self._renew(held) if event_id in self._held]
        if lost:
            self.drop(lost)
            log.warning("Leases lost to another consumer", extra={"events": len(lost)})
