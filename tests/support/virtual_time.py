"""Event loop with virtual time: minutes of backoff and heartbeats run in milliseconds, and deterministically.

The loop has no sockets and no threads. When all tasks wait, the loop sets its clock to the next timer. If there is no
timer either, the loop raises an error instead of hanging.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec

P = ParamSpec("P")

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class _Jumping(selectors.SelectSelector):
    """Selector that never blocks, and adds the time-out to ``passed`` instead."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("all tasks wait, and there is no timer")
        if not ready and timeout is not None:
            self.passed += timeout
        return ready


class _NumberedTask(asyncio.Task[Any]):
    """Task that hashes to its number.

    Task groups cancel the members of a set in hash order. By default that is the order of memory addresses, and every
    run would be different.
    """

    def __init__(self, *args: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Called after the test, in `in_virtual_time`."""
        numbers = itertools.count(1)
        self.set_task_factory(
            lambda loop, coroutine, **options: _NumberedTask(coroutine, loop=loop, number=next(numbers), **options)
        )

    def time(self) -> float:
        return self._jumping.passed


def runner_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def now() -> datetime:
    """Return the date and time of the running loop."""
    return _BEGINNING + timedelta(seconds=asyncio.get_running_loop().time())


async def until(condition: Callable[[], object], what: str, within: float = 120.0) -> None:
    """Wait until the condition is true, by the clock of the loop; see `support.wait`."""
    deadline = asyncio.get_running_loop().time() + within
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited {within:g} s for {what}, and it did not come"
        await asyncio.sleep(0.01)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in virtual time. A test that leaves a task behind fails."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await test(*args, **kwargs)
            for end in runner_loop().at_end:
                await end()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"the test left tasks behind: {left}"

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(whole())

    return run
