"""Lanes: which event may start next. Pure data structures, without time, I/O or tasks of their own.

A lane holds the events of one key of one partition. Its first event (the head) is *ready*, *taken* by the engine, or
*parked* until it is due; the events behind it wait. An event without a key has a lane of its own.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import count

from mailboat.consumer.broker.interfaces import Record
from mailboat.consumer.broker.work import Key, Work


class Lanes:
    """All lanes of one engine."""

    def __init__(self) -> None:
        self.ready: deque[Work] = deque()
        self._behind: dict[Key, deque[Work] | None] = {}
        """Events behind the head, for every lane with a head. None is an empty queue."""
        self._parked: list[tuple[float, int, Work]] = []
        self._order = count()

    def add(self, records: Iterable[Record]) -> int:
        """Append records to their lanes and return their number."""
        behind, ready = self._behind, self.ready
        added = 0
        for added, record in enumerate(records, 1):  # noqa: B007
            key = record.event.key
            if key is None:
                ready.append(Work(record, None))
                continue
            lane = (record.partition, key)
            work = Work(record, lane)
            if lane not in behind:
                behind[lane] = None
                ready.append(work)
            elif (queue := behind[lane]) is None:
                behind[lane] = deque((work,))
            else:
                queue.append(work)
        return added

    def take(self, limit: int) -> list[Work]:
        """Remove and return up to ``limit`` ready heads. Each must be finished, parked or put back."""
        ready = self.ready
        return [ready.popleft() for _ in range(min(limit, len(ready)))]

    def requeue(self, works: Collection[Work]) -> None:
        """Make taken heads ready again, first in line, in their order."""
        self.ready.extendleft(reversed(list(works)))

    def finish(self, work: Work) -> None:
        """Remove a taken head. The next event of its lane becomes ready."""
        if (lane := work.lane) is None:
            return
        queue = self._behind[lane]
        if queue:
            self.ready.append(queue.popleft())
        else:
            del self._behind[lane]

    def park(self, work: Work, due: float, cause: str) -> None:
        """Let a taken head wait until ``due``; it stays the head of its lane."""
        work.due, work.cause = due, cause
        heapq.heappush(self._parked, (due, next(self._order), work))

    def release_due(self, now: float) -> bool:
        """Make parked heads ready whose time has come, and return whether there were any."""
        released = False
        while self._parked and self._parked[0][0] <= now:
            self.ready.append(heapq.heappop(self._parked)[2])
            released = True
        return released

    @property
    def next_due(self) -> float | None:
        return self._parked[0][0] if self._parked else None

    def parked(self) -> Iterator[tuple[Work, int]]:
        """Yield each parked head with the number of events behind it."""
        for _, _, work in self._parked:
            queue = None if work.lane is None else self._behind.get(work.lane)
            yield work, len(queue or ())

    @property
    def parked_count(self) -> int:
        return len(self._parked)

    @property
    def behind_count(self) -> int:
        return sum(len(queue) for queue in self._behind.values() if queue)

    def forget(self, partitions: Collection[int]) -> list[Work]:
        """Remove and return all events of these partitions that are not taken. A taken head keeps its lane, so that a
        later event of its key waits for it even if the partition is assigned again meanwhile."""
        forgotten = [work for work in self.ready if work.record.partition in partitions]
        forgotten += [work for _, _, work in self._parked if work.record.partition in partitions]
        heads = {work.lane for work in forgotten}
        self.ready = deque(work for work in self.ready if work.record.partition not in partitions)
        self._parked = [each for each in self._parked if each[2].record.partition not in partitions]
        heapq.heapify(self._parked)
        for lane in [lane for lane in self._behind if lane[0] in partitions]:
            forgotten += self._behind[lane] or ()
            if lane in heads:
                del self._behind[lane]
            else:
                self._behind[lane] = None
        return forgotten
