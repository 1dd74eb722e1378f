"""Offsets of Kafka partitions: what was received, what is settled, what may be committed, what was."""

from __future__ import annotations

from collections import deque
from typing import Any

from mailboat.consumer.broker.interfaces import PartitionState


class Entry:
    """A received message, until it and all messages before it are settled."""

    __slots__ = ("offset", "progress", "settled", "size", "timestamp")

    def __init__(self, progress: Progress, offset: int, size: int, timestamp: Any) -> None:
        self.progress = progress
        self.offset = offset
        self.size = size
        self.timestamp = timestamp
        self.settled = False


class Progress:
    """Offsets of one partition: what was received, what is settled, and what may be committed.

    One thread calls ``receive``, another one ``settle``. Each changes its own end of the queue and its own counter,
    and the other one only reads it.
    """

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.position: int | None = None
        """Offset to commit: one past the last message before which all are settled. None before the first one."""
        self.last: int | None = None
        """Last offset received."""
        self.settled = 0
        """Messages passed by the watermark since the assignment."""
        self._bytes_in = 0
        self._bytes_out = 0

    def receive(self, offset: int, size: int, timestamp: Any) -> Entry:
        entry = Entry(self, offset, size, timestamp)
        self.last = offset
        self._bytes_in += size
        self.entries.append(entry)
        return entry

    def settle(self, entry: Entry) -> bool:
        """Mark a message as settled, and return whether the position moved. Offsets may have gaps (compaction,
        transactions)."""
        entry.settled = True
        entries = self.entries
        if not entries or entries[0] is not entry:
            return False
        while entries and entries[0].settled:
            passed = entries.popleft()
            self._bytes_out += passed.size
            self.settled += 1
            self.position = passed.offset + 1
        return True

    @property
    def ahead(self) -> int:
        """Messages beyond the watermark, settled ones among them."""
        return len(self.entries)

    @property
    def bytes_ahead(self) -> int:
        return self._bytes_in - self._bytes_out


class Partition:
    """A partition that this process owns. A new assignment makes a new object, so late results of the old one are
    ignored."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.progress = Progress()
        self.closed = False
        self.paused = False
        self.requested: int | None = None
        """Offset of the last commit that was sent."""
        self.settled_then = 0
        """``Progress.settled`` when it was sent."""
        self.committed: int | None = None
        self.lag: int | None = None

    @property
    def is_ahead(self) -> bool:
        """True if the position has moved since the last commit."""
        position = self.progress.position
        return position is not None and position != self.requested

    @property
    def unsent(self) -> int:
        """Messages passed by the position since the last commit."""
        return self.progress.settled - self.settled_then

    def position_to_commit(self) -> int:
        """Return the offset to commit, and note it as sent."""
        self.settled_then = self.progress.settled  # read first: the position may move in between, never back
        position = self.progress.position
        assert position is not None, "the position has moved"
        self.requested = position
        return position

    def state(self) -> PartitionState:
        try:
            oldest = self.progress.entries[0].timestamp
        except IndexError:
            oldest = None
        return PartitionState(lag=self.lag, ahead=self.progress.ahead, oldest=oldest, paused=self.paused)
