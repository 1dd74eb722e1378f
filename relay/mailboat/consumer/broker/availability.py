"""Availability of something that the engine needs: the claim store, the dead-letter topic, the broker."""

import logging
from random import Random
from typing import Final

from mailboat.delivery.backoff import Backoff

_BACKOFF: Final = Backoff(initial=0.1, factor=2, ceiling=5.0, jitter=0.2)


class Availability:
    """Logs the beginning and the end of an outage once each, and spaces the tries in between."""

    def __init__(self, name: str, log: logging.Logger, consumer: str, random: Random | None = None) -> None:
        self.error: str | None = None
        """Why it is unavailable; None if it is available."""
        self._name = name
        self._log = log
        self._consumer = consumer
        self._random = random or Random()
        self._failures = 0

    def failed(self, message: str) -> float:
        """Note a failed try and return the seconds until the next one."""
        if self.error is None:
            self._log.warning("%s unavailable: %s", self._name, message, extra={"consumer": self._consumer})
        self.error = message
        self._failures += 1
        return _BACKOFF.delay(self._failures, self._random)

    def succeeded(self) -> None:
        if self.error is not None:
            self._log.info("%s available again", self._name, extra={"consumer": self._consumer})
        self.error = None
        self._failures = 0
