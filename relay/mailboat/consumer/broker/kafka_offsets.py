"""Offsets of Kafka partitions: received, settled, committable and committed.

Messages are settled in any order, and Kafka stores one offset per partition. The *position* is one past the last
message before which all are settled. Only the position is committed, so no commit passes an unsettled message.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mailboat.consumer.broker.interfaces import PartitionState


class Entry:
    """A received message. It leaves the queue when it and all messages before it are settled."""

    __slots__ = ("offset", "progress", "settled", "size", "timestamp")

    def __init__(self, progress: Progress, offset: int, size: int, timestamp: Any) -> None:
        self.progress = progress
        self.offset = offset
        self.size = size
        self.timestamp = timestamp
        self.settled = False


class Progress:
    """Received messages of one partition, and its position.

    The client's thread calls ``receive``, the event loop calls ``settle``. Each of them changes one end of the queue
    and one counter of bytes, so no lock is needed.
    """

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.position: int | None = None
        """Offset to commit. None until the first message is settled."""
        self.last: int | None = None
        """Last offset received."""
        self.settled = 0
        """Messages passed by the position since the assignment."""
        self._bytes_in = 0
        self._bytes_out = 0

    def receive(self, offset: int, size: int, timestamp: Any) -> Entry:
        entry = Entry(self, offset, size, timestamp)
        self.last = offset
        self._bytes_in += size
        self.entries.append(entry)
        return entry

    def settle(self, entry: Entry) -> bool:
        """Mark a message as settled, and return True if the position moved. Compaction and transactions leave gaps
        between offsets."""
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
        """Messages beyond the position, settled or not."""
        return len(self.entries)

    @property
    def bytes_ahead(self) -> int:
        return self._bytes_in - self._bytes_out


class Partition:
    """An assigned partition. Each assignment creates a new object, so results of an earlier assignment have no
    effect."""

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
        """Return the position, and record it as requested."""
        self.settled_then = self.progress.settled  # before the position, which may advance meanwhile
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
