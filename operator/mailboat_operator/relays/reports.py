"""Reports of relay and consumer pods: how they are polled, and the bounds on what the operator keeps of them.

A report comes from a pod that an application owns, and the operator keeps the last one of each pod. So only the
subscriptions and partitions named by resources are kept, with texts cut to a maximum length.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Generic, TypeVar

from mailboat_operator.relays.pods import ConsumerPod, PolledPod, RelayPod
from mailboat_spec import EventSubscriptionSpec, Reason
from mailboat_spec.consumer_report import ConsumerReport
from mailboat_spec.relay_status import ConfigReport, ProcessStatus, RelayStatus, SubscriptionStatus

_LONGEST_TEXT: Final = 1024
_LONGEST_NAME: Final = 317  # namespace/pod
_MOST_PARTITIONS: Final = 256
_MOST_SILENT: Final = 16
_USUAL_PARTITIONS: Final[int] = EventSubscriptionSpec.model_fields["partitions"].default
_SMALLEST: Final = 64 * 1024
_PER_SUBSCRIPTION: Final = 2048
_PER_PARTITION: Final = 768
"""Bytes. A partition takes about 150, and more if it carries an error."""
_LARGEST: Final = 12 * 1024 * 1024
_CALLS_AT_A_TIME: Final = 8
"""Concurrent calls to the pods of one resource, so that unresponsive pods do not delay other resources."""

Partitions = Mapping[str, int]
"""Subscriptions of one relay by full name, each with its number of partitions."""

Reported = TypeVar("Reported", RelayStatus, SubscriptionStatus, ConfigReport)


def partitions_of(subscriptions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the subscriptions that reports may contain, from API resources, valid or not."""
    return {f"{each['metadata']['namespace']}/{each['metadata']['name']}": _partitions(each) for each in subscriptions}


def _partitions(subscription: Mapping[str, Any]) -> int:
    spec = subscription.get("spec")
    number = spec.get("partitions", _USUAL_PARTITIONS) if isinstance(spec, Mapping) else None
    return number if isinstance(number, int) and 0 < number <= _MOST_PARTITIONS else _MOST_PARTITIONS


def largest_report(partitions: Partitions) -> int:
    needed = sum(_PER_SUBSCRIPTION + count * _PER_PARTITION for count in partitions.values())
    return min(_SMALLEST + needed, _LARGEST)


def pod_of(relay_id: str | None, namespace: str) -> str:
    """Return the pod name of a relay. The id of a relay in another namespace (same database) is returned unchanged."""
    return (relay_id or "").removeprefix(f"{namespace}/")


def parse_reason(text: str, default: Reason) -> Reason:
    """Parse a relay's machine-readable reason. A relay of another version may use unknown words."""
    try:
        return Reason(text)
    except ValueError:
        return default


P = TypeVar("P", bound=PolledPod)
R = TypeVar("R", ProcessStatus, ConsumerReport)


@dataclass(frozen=True)
class PodAnswer(Generic[P, R]):
    """Last report of one pod, or the reason why there is none."""

    pod: P
    report: R | None
    error: str = ""
    """Why the last poll brought no report; empty if it did."""
    silent: bool = False
    """The pod answered before and does not any more. ``report``, if any, is from before."""


Answer = PodAnswer[RelayPod, ProcessStatus]
ConsumerAnswer = PodAnswer[ConsumerPod, ConsumerReport]


def relay_reports(answers: Iterable[Answer], relay: str) -> list[tuple[Answer, RelayStatus]]:
    """Return the reports about a relay (namespace/name), each with its answer."""
    return [
        (answer, report)
        for answer in answers
        if answer.report is not None and (report := answer.report.relay(relay)) is not None
    ]


def config_version(answer: Answer) -> int:
    """Return the version of the configuration that a relay reports; 0 if it reports none."""
    return (answer.report.config.version or 0) if answer.report is not None else 0


def bounded(status: ProcessStatus, relay: str, partitions: Partitions) -> ProcessStatus:
    """Return the part of the status about this relay and its known subscriptions."""
    found = status.relay(relay)
    if found is None:
        return ProcessStatus(config=_cut(status.config))
    named = {each.name: each for each in found.subscriptions if each.name in partitions}
    kept = tuple(_bounded_subscription(each, partitions[each.name]) for each in named.values())
    silent = tuple(name for name in found.silent if len(name) <= _LONGEST_NAME)[:_MOST_SILENT]
    cut = replace(_cut(found), subscriptions=kept, silent=silent, peers=(), outbox="")
    return ProcessStatus((cut,), _cut(status.config))


def _bounded_subscription(status: SubscriptionStatus, count: int) -> SubscriptionStatus:
    owned, orphans = (
        tuple(replace(each, last_error=None) for each in given if 0 <= each.partition < count)[:count]
        for given in (status.owned, status.orphans)
    )
    owners = {
        number: owner
        for number, owner in status.owners.items()
        if 0 <= number < count and len(owner or "") <= _LONGEST_NAME
    }
    return replace(_cut(status), owned=owned, orphans=orphans, owners=owners)


def _cut(status: Reported) -> Reported:
    """Return the report with every text cut to the maximum length."""
    texts = {each.name: getattr(status, each.name) for each in fields(status)}
    cut: dict[str, Any] = {name: text[:_LONGEST_TEXT] for name, text in texts.items() if isinstance(text, str)}
    return replace(status, **cut)


@dataclass(frozen=True, slots=True)
class PollTimeouts:
    """Timeouts in seconds."""

    silence: float = 15.0
    """How long the last report of an unresponsive pod counts: one lost packet must not move a partition."""
    assignment: float = 30.0
    """How long relays may take to follow an assignment before it is pushed again."""
    poll: float = 10.0
    """Time limit for the status calls of one reconcile. Pods that never answered are polled last, in turn."""


@dataclass(slots=True)
class PodPoll(Generic[P, R]):
    """Polls of one resource's pods, with the last report of each pod."""

    timeouts: PollTimeouts
    others: str
    """Word for the other pods of the resource, in messages."""
    clock: Callable[[], float] = time.monotonic
    reports: dict[str, tuple[R, float]] = field(default_factory=dict)
    """Last report and its time, by pod uid."""
    called: dict[str, float] = field(default_factory=dict)
    """Time of the last status call, by pod uid."""
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CALLS_AT_A_TIME))

    async def poll(self, pods: Sequence[P], call: Callable[[P], Awaitable[PodAnswer[P, R]]]) -> list[PodAnswer[P, R]]:
        """Poll every pod. Return one answer each: the new report, else the last one if recent, and the error of now.

        A pod that answered before and does not now is marked as silent at once, unless there was no time to ask it.
        """
        answered = await self._call(pods, call)
        now = self.clock()
        result = []
        for pod in pods:
            late = f"was not asked yet: other {self.others} take too long to answer"
            answer = answered.get(pod.uid) or PodAnswer(pod, None, late)
            if answer.report is not None:
                self.reports[pod.uid] = (answer.report, now)
            last, at = self.reports.get(pod.uid, (None, now))
            silent = last is not None and answer.report is None and pod.uid in answered
            recent = last if now - at <= self.timeouts.silence else None
            result.append(replace(answer, report=recent, silent=silent))
        present = [pod.uid for pod in pods]
        self.reports = {uid: self.reports[uid] for uid in present if uid in self.reports}
        self.called = {uid: self.called[uid] for uid in present if uid in self.called}
        return result

    async def _call(
        self, pods: Sequence[P], call: Callable[[P], Awaitable[PodAnswer[P, R]]]
    ) -> dict[str, PodAnswer[P, R]]:
        """Return the answers that arrived within the time limit, by pod uid."""
        answers: dict[str, PodAnswer[P, R]] = {}

        async def call_one(pod: P) -> None:
            async with self.calls:
                self.called[pod.uid] = self.clock()
                answers[pod.uid] = await call(pod)

        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeouts.poll), asyncio.TaskGroup() as tasks:
                for pod in sorted(pods, key=lambda pod: (pod.uid not in self.reports, self.called.get(pod.uid, 0.0))):
                    tasks.create_task(call_one(pod))
        return answers
