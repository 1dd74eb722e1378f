"""Partitions of a topic that have accepted a batch from one producer, and the keys that must wait for that.

*The exception in the gapless guarantee.* A broker checks sequence numbers against the last one stored for this producer
and partition. Before the first batch is accepted there is none, and the broker accepts any number: if the very first
batch is refused, the second one, sent right behind it, is accepted (Apache Kafka 4.3 does so, with one request in
flight as well as with five). So the first message of a key is sent alone until its partition has accepted a batch from
this producer. That costs a few round trips at the start of a session and nothing after.
"""

from __future__ import annotations

from typing import Final

_MAX_PROVEN: Final = 100_000


class ProvenPartitions:
    """State of one topic of one producer. ``cold``, ``first`` and ``proven`` are read directly, once per message."""

    def __init__(self) -> None:
        self.cold: set[int] = set()
        """Partitions that have not accepted a batch yet."""
        self.first: set[str] = set()
        """Keys whose first message is unacknowledged: no other message of these keys may be sent."""
        self.proven: set[str] = set()
        """Keys whose partition is warm, kept while other partitions are cold."""
        self._partitions = 0

    def widen(self, partitions: int) -> None:
        """Set the topic's partition count. New partitions are cold."""
        self.cold.update(range(self._partitions, partitions))
        self._partitions = max(self._partitions, partitions)

    def accepted(self, key: str, partition: int) -> None:
        """Record that the first message of a key was acknowledged."""
        self.cold.discard(partition)
        if not self.cold or len(self.proven) >= _MAX_PROVEN:
            self.proven.clear()
        if self.cold:
            self.proven.add(key)
        self.first.discard(key)
