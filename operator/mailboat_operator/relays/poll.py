"""Status calls to the pods of one resource: bounded in number and time, with the last answer of each pod."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

_CALLS_AT_A_TIME: Final = 8
"""Concurrent calls to the pods of one resource, so that unresponsive pods do not delay other resources."""


@dataclass(frozen=True, slots=True)
class PollTimeouts:
    """Timeouts in seconds."""

    silence: float = 15.0
    """How long the last report of an unresponsive pod counts: one lost packet must not move a partition."""
    following: float = 30.0
    """How long relays may take to follow an assignment before it is pushed again."""
    asking: float = 10.0
    """Time limit for the status calls of one reconcile. Pods that never answered are polled last, in turn."""


class PolledPod(Protocol):
    """A pod with a status endpoint."""

    @property
    def uid(self) -> str: ...

    @property
    def name(self) -> str: ...


class PolledAnswer(Protocol):
    """An answer; ``report`` is None if there was none."""

    @property
    def report(self) -> Any: ...


P = TypeVar("P", bound=PolledPod)
A = TypeVar("A", bound=PolledAnswer)


@dataclass(frozen=True, slots=True)
class Polled(Generic[A]):
    """Result of one pod."""

    answer: A
    """The answer of this poll."""
    recent: A | None
    """The last answer with a report, if it is not too old."""
    known: bool
    """The pod answered before, or now."""


@dataclass(slots=True)
class PodPoll(Generic[A]):
    """The last answers of one resource's pods."""

    patience: PollTimeouts
    clock: Callable[[], float] = time.monotonic
    seen: dict[str, tuple[A, float]] = field(default_factory=dict)
    """Last successful answer and its time, by pod uid."""
    asked: dict[str, float] = field(default_factory=dict)
    """Time of the last status call, by pod uid."""
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CALLS_AT_A_TIME))

    async def poll(
        self, pods: Sequence[P], call: Callable[[P], Awaitable[A]], late: Callable[[P], A]
    ) -> list[Polled[A]]:
        """Poll every pod and return one result each. ``late`` makes the answer of a pod that was not asked in time."""
        answered = await self._ask(pods, call)
        now = self.clock()
        result = []
        for pod in pods:
            answer = answered.get(pod.uid) or late(pod)
            if answer.report is not None:
                self.seen[pod.uid] = (answer, now)
            last, at = self.seen.get(pod.uid, (None, now))
            recent = last if now - at <= self.patience.silence else None
            result.append(Polled(answer, recent, known=last is not None))
        present = {pod.uid for pod in pods}
        self.seen = {uid: seen for uid, seen in self.seen.items() if uid in present}
        self.asked = {uid: at for uid, at in self.asked.items() if uid in present}
        return result

    async def _ask(self, pods: Sequence[P], call: Callable[[P], Awaitable[A]]) -> dict[str, A]:
        """Return the answers that arrived within the time limit, by pod uid."""
        answers: dict[str, A] = {}

        async def ask(pod: P) -> None:
            async with self.calls:
                self.asked[pod.uid] = self.clock()
                answers[pod.uid] = await call(pod)

        with suppress(TimeoutError):
            async with asyncio.timeout(self.patience.asking), asyncio.TaskGroup() as tasks:
                for pod in sorted(pods, key=lambda pod: (pod.uid not in self.seen, self.asked.get(pod.uid, 0.0))):
                    tasks.create_task(ask(pod))
        return answers
