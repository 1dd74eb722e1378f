"""Status calls to the pods of one resource: bounded in number and time, with the last answer of each pod."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from mailboat_operator.relays.pods import PolledPod
from mailboat_operator.relays.reports import PodAnswer, R

_CALLS_AT_A_TIME: Final = 8
"""Concurrent calls to the pods of one resource, so that unresponsive pods do not delay other resources."""


@dataclass(frozen=True, slots=True)
class PollTimeouts:
    """Timeouts in seconds."""

    silence: float = 15.0
    """How long the last report of an unresponsive pod counts: one lost packet must not move a partition."""
    assignment: float = 30.0
    """How long relays may take to follow an assignment before it is pushed again."""
    poll: float = 10.0
    """Time limit for the status calls of one reconcile. Pods that never answered are polled last, in turn."""


P = TypeVar("P", bound=PolledPod)


@dataclass(slots=True)
class PodPoll(Generic[R]):
    """The last reports of one resource's pods."""

    timeouts: PollTimeouts
    others: str
    """Word for the other pods of the resource, in messages."""
    clock: Callable[[], float] = time.monotonic
    reports: dict[str, tuple[R, float]] = field(default_factory=dict)
    """Last report and its time, by pod uid."""
    called: dict[str, float] = field(default_factory=dict)
    """Time of the last status call, by pod uid."""
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CALLS_AT_A_TIME))

    async def poll(self, pods: Sequence[P], call: Callable[[P], Awaitable[PodAnswer[R]]]) -> list[PodAnswer[R]]:
        """Poll every pod. Return one answer each: the new report, else the last one if recent, and the error of now.

        A pod that answered before and does not now is marked as silent at once, unless there was no time to ask it.
        """
        answered = await self._call(pods, call)
        now = self.clock()
        result = []
        for pod in pods:
            late = f"was not asked yet: other {self.others} take too long to answer"
            answer = answered.get(pod.uid) or PodAnswer(pod.name, None, late)
            if answer.report is not None:
                self.reports[pod.uid] = (answer.report, now)
            last, at = self.reports.get(pod.uid, (None, now))
            silent = last is not None and answer.report is None and pod.uid in answered
            recent = last if now - at <= self.timeouts.silence else None
            result.append(replace(answer, report=recent, silent=silent))
        present = {pod.uid for pod in pods}
        self.reports = {uid: report for uid, report in self.reports.items() if uid in present}
        self.called = {uid: at for uid, at in self.called.items() if uid in present}
        return result

    async def _call(self, pods: Sequence[P], call: Callable[[P], Awaitable[PodAnswer[R]]]) -> dict[str, PodAnswer[R]]:
        """Return the answers that arrived within the time limit, by pod uid."""
        answers: dict[str, PodAnswer[R]] = {}

        async def call_one(pod: P) -> None:
            async with self.calls:
                self.called[pod.uid] = self.clock()
                answers[pod.uid] = await call(pod)

        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeouts.poll), asyncio.TaskGroup() as tasks:
                for pod in sorted(pods, key=lambda pod: (pod.uid not in self.reports, self.called.get(pod.uid, 0.0))):
                    tasks.create_task(call_one(pod))
        return answers
