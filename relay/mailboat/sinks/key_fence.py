"""Blocked keys: keys with a failed message, while calls created before the failure was returned are still running.

A worker that overlaps batches receives a failure only when the failed call returns. Until then it may hand over later
messages of the same key, in calls that are already running or that it starts before it receives the failure. A sink
with ``Traits.stops_behind_failure`` returns ``Undecided`` for those messages. This module tracks them.

A call stops a key if one of its messages of that key failed or was ``Undecided``, until the call returns. The key stays
blocked for every other call that was created before then. Later calls, other keys and therefore other partitions are
not affected.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self
from weakref import WeakSet


class KeyFence:
    """Stopped keys of one sink. Used from its event loop only."""

    def __init__(self) -> None:
        self._holds: dict[str, int] = {}
        self._waiting: WeakSet[FenceTicket] = WeakSet()

    def call(self) -> FenceTicket:
        """Return the hold of one call. Create it when ``publish`` is called, not when its coroutine first runs, and
        enter it around the whole call."""
        return FenceTicket(self._holds, self._waiting)


class FenceTicket:
    """Keys that one call must not send, and keys that it blocks for other calls until it has returned."""

    def __init__(self, holds: dict[str, int], waiting: WeakSet[FenceTicket]) -> None:
        self._holds = holds
        self._waiting = waiting
        self._returned = False
        self._stopped: set[str] = set()
        self.blocked: set[str | None] = set()
        """Keys that this call must not send, valid after ``begin``. Updated in place, so callers may keep the set."""
        waiting.add(self)

    def begin(self) -> None:
        """Begin to send. Keys that are stopped now, or were at any time since the call was created, are blocked."""
        self._waiting.discard(self)
        self.blocked.update(self._holds)

    def stop(self, key: str | None) -> None:
        """Record that a message of this key did not arrive. A message without a key blocks nothing.

        No effect after the call has returned: a cancelled call may receive its results later.
        """
        if key is not None and key not in self._stopped and not self._returned:
            self._stopped.add(key)
            self._holds[key] = self._holds.get(key, 0) + 1
            self.blocked.add(key)

    def is_sole(self, key: str | None) -> bool:
        """Return whether no other call stops this key."""
        return key is None or self._holds.get(key, 0) <= (key in self._stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._returned = True
        self._waiting.discard(self)
        if not self._stopped:
            return
        for call in self._waiting:
            call.blocked |= self._stopped
        for key in self._stopped:
            left = self._holds[key] - 1
            if left:
                self._holds[key] = left
            else:
                del self._holds[key]
