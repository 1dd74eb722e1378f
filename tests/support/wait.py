"""Waits of all tests: poll a condition until a deadline, with a description for the error.

A condition reports by its value. If a condition raises, the wait raises the same error.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast, overload

Answer = TypeVar("Answer")

PATIENCE = 60.0
"""Default deadline in seconds, generous for a busy machine. A condition that is met ends the wait early."""
_POLL = 0.02
_LONGEST_PAUSE = 0.5
_DAY = 86_400
_BEFORE_MIDNIGHT = 20
"""Seconds before midnight in which no test starts that depends on the day."""


def wait_until(
    condition: Callable[[], Answer],
    timeout: float = PATIENCE,
    what: str = "the condition",
    met: Callable[[Answer], object] = bool,
) -> Answer:
    """Poll until the condition returns a value that is ``met``, by default a true one, and return the value.

    After the deadline the error shows the last value.
    """
    deadline = time.monotonic() + timeout
    while True:
        asked = time.monotonic()
        if met(answer := condition()):
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(_too_late(what, timeout, answer))
        time.sleep(_pause_since(asked))


def until_midnight_is_over() -> None:
    """Wait until a test fits into one day in UTC, since time partitions are days."""
    wait_until(lambda: time.time() % _DAY < _DAY - _BEFORE_MIDNIGHT, what="midnight to be over")


@overload
async def await_until(condition: Callable[[], Awaitable[Answer]], timeout: float = ..., what: str = ...) -> Answer: ...
@overload
async def await_until(condition: Callable[[], Answer], timeout: float = ..., what: str = ...) -> Answer: ...
async def await_until(
    condition: Callable[[], Answer | Awaitable[Answer]], timeout: float = PATIENCE, what: str = "the condition"
) -> Answer:
    """Poll without blocking the event loop. The condition may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        asked = time.monotonic()
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return cast(Answer, answer)
        if time.monotonic() > deadline:
            raise AssertionError(_too_late(what, timeout, answer))
        await asyncio.sleep(_pause_since(asked))


def _pause_since(asked: float) -> float:
    """Return a pause in proportion to the duration of the condition, so that a slow one does not load the machine."""
    return max(_POLL, min(2 * (time.monotonic() - asked), _LONGEST_PAUSE))


def _too_late(what: str, timeout: float, answer: object) -> str:
    return f"waited {timeout:g} s for {what}, and it did not come; the last answer was {answer!r}"
