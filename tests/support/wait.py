"""The one way in which tests wait: until something is true, with a deadline and a sentence about what was awaited.

What a condition raises is not swallowed: it answers by the truth of its value.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast, overload

Answer = TypeVar("Answer")

PATIENCE = 60.0
"""Seconds. What takes one on an idle machine may take many on a busy one; what comes soon is waited for no longer."""
_POLL = 0.02
_LONGEST_PAUSE = 0.5
_DAY = 86_400
_BEFORE_MIDNIGHT = 20
"""Seconds in which no test begins that may count days."""


def wait_until(
    condition: Callable[[], Answer],
    timeout: float = PATIENCE,
    what: str = "the condition",
    met: Callable[[Answer], object] = bool,
) -> Answer:
    """Poll until the condition is true, and return what it answered.

    With ``met`` the condition answers with whatever there is to know, and ``met`` says whether that is it: so the
    message of a wait in vain has something to tell.
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
    """Time partitions are of days, in UTC: a test that counts them should see one day only."""
    wait_until(lambda: time.time() % _DAY < _DAY - _BEFORE_MIDNIGHT, what="midnight to be over")


@overload
async def await_until(condition: Callable[[], Awaitable[Answer]], timeout: float = ..., what: str = ...) -> Answer: ...
@overload
async def await_until(condition: Callable[[], Answer], timeout: float = ..., what: str = ...) -> Answer: ...
async def await_until(
    condition: Callable[[], Answer | Awaitable[Answer]], timeout: float = PATIENCE, what: str = "the condition"
) -> Answer:
    """The same without blocking the event loop; the condition may be a coroutine function."""
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
    """A question that takes a whole program, or a long list, to answer must not take all of the machine."""
    return max(_POLL, min(2 * (time.monotonic() - asked), _LONGEST_PAUSE))


def _too_late(what: str, timeout: float, answer: object) -> str:
    return f"waited {timeout:g} s for {what}, and it did not come; the last answer was {answer!r}"
