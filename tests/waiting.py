"""The one way in which tests wait: until something is true, with a deadline and a sentence about what was awaited.

What a condition raises is not swallowed: it answers by the truth of its value.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

Answer = TypeVar("Answer")

_POLL = 0.02


def wait_until(condition: Callable[[], Answer], timeout: float = 10.0, what: str = "the condition") -> Answer:
    """Poll until the condition is true, and return what it answered."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_too_late(what, timeout, answer))
        time.sleep(_POLL)
    return answer


async def await_until(
    condition: Callable[[], Answer | Awaitable[Answer]], timeout: float = 10.0, what: str = "the condition"
) -> Answer:
    """The same without blocking the event loop; the condition may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return cast(Answer, answer)
        if time.monotonic() > deadline:
            raise AssertionError(_too_late(what, timeout, answer))
        await asyncio.sleep(_POLL)


def _too_late(what: str, timeout: float, answer: object) -> str:
    return f"waited {timeout:g} s for {what}, and it did not come; the last answer was {answer!r}"
