"""Which partitions of a topic have accepted a batch from one producer, and which keys have to wait for that.

*The hole in the gap-less guarantee.* A broker checks sequence numbers against the last one it knows of this producer
and partition. It knows none before the first batch is accepted, and then takes any: if the very first batch is refused,
the second one, sent right behind it, is accepted (Apache Kafka 4.3 does so, with one request in flight as well as with
five). So the first message of a key goes alone until the partition it falls on has accepted something from this
producer. That costs a few round trips at the start of a session, and nothing after.
"""

from __future__ import annotations

from typing import Final

_MAX_PROVEN: Final = 100_000


class Warmth:
    """One topic of one producer. ``cold``, ``first`` and ``proven`` are read directly, once per message."""

    def __init__(self) -> None:
        self.cold: set[int] = set()
        """Partitions that have accepted nothing yet."""
        self.first: set[str] = set()
        """Keys whose first message is unacknowledged: nothing else of them may be sent."""
        self.proven: set[str] = set()
        """Keys whose partition is warm, while others are cold."""
        self._partitions = 0

    def widen(self, partitions: int) -> None:
        """The topic has this many partitions. New ones are cold."""
        self.cold.update(range(self._partitions, partitions))
        self._partitions = max(self._partitions, partitions)

    def accepted(self, key: str, partition: int) -> None:
        """The first message of a key arrived."""
        self.cold.discard(partition)
        if not self.cold or len(self.proven) >= _MAX_PROVEN:
            self.proven.clear()
        if self.cold:
            self.proven.add(key)
        self.first.discard(key)
