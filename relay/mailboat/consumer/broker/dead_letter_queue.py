"""Dead letters on their way to the dead-letter topic.

An event stays the head of its lane until its dead letter is acknowledged. While the topic is unavailable, all waiting
dead letters are tried again together, with back-off.
"""

import asyncio
from collections import deque
from itertools import islice
from typing import Final

from mailboat.consumer.broker.availability import Availability
from mailboat.consumer.broker.interfaces import DeadLetters, DeadLettersUnavailable, DeadRecord
from mailboat.consumer.broker.work import Lifecycle, Work

_AT_ONCE: Final = 100
"""Dead letters written concurrently."""


class DeadLetterQueue:
    """Writes dead letters. ``run`` is one task of the engine."""

    def __init__(self, dead_letters: DeadLetters, availability: Availability, lifecycle: Lifecycle) -> None:
        self._dead_letters = dead_letters
        self._availability = availability
        self._lifecycle = lifecycle
        self._waiting: deque[tuple[Work, DeadRecord]] = deque()
        self._wake = asyncio.Event()

    def add(self, work: Work, letter: DeadRecord) -> None:
        """Queue a dead letter. ``Lifecycle.dead_lettered`` is called after it is acknowledged."""
        self._waiting.append((work, letter))
        self._wake.set()

    def withdraw(self) -> list[Work]:
        """Remove dead letters that wait for another try and whose partition is gone; return their work."""
        withdrawn = [work for work, _ in self._waiting if work.detached]
        self._waiting = deque(each for each in self._waiting if not each[0].detached)
        return withdrawn

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = list(islice(self._waiting, _AT_ONCE))
                for _ in batch:
                    self._waiting.popleft()
                results = await asyncio.gather(*(self._write(*each) for each in batch))
                refused = [each for each, error in zip(batch, results, strict=True) if error is not None]
                self._waiting.extendleft(reversed(refused))
                if refused:
                    error = next(error for error in results if error is not None)
                    await asyncio.sleep(self._availability.failed(str(error)))
                else:
                    self._availability.succeeded()

    async def _write(self, work: Work, letter: DeadRecord) -> DeadLettersUnavailable | None:
        try:
            await self._dead_letters.write(letter)
        except DeadLettersUnavailable as error:
            return error
        self._lifecycle.dead_lettered(work)
        return None
