"""Which keys must wait: something of theirs failed, and calls that were made by then have not returned yet.

A pump that overlaps batches learns of a failure only when the call that met it returns. Until then it may hand over
later messages of the same key, in calls that are on the way already or that it makes in good faith. A sink that
promises ``Traits.stops_behind_failure`` answers ``Undecided`` for those. This is the book it keeps.

A key is stopped by every call in which a message of it failed or was answered ``Undecided``, until that call returns.
It stays blocked for every other call that was made before then. Calls that are made later, and other keys, and so other
partitions, are not touched.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self
from weakref import WeakSet


class KeyStops:
    """The stopped keys of one sink. Used from its event loop only."""

    def __init__(self) -> None:
        self._holds: dict[str, int] = {}
        self._waiting: WeakSet[CallHold] = WeakSet()

    def call(self) -> CallHold:
        """To be made when ``publish`` is called (not when its coroutine first runs), and entered around all of it."""
        return CallHold(self._holds, self._waiting)


class CallHold:
    """What one call must not send, and what it keeps others from sending until it has returned."""

    def __init__(self, holds: dict[str, int], waiting: WeakSet[CallHold]) -> None:
        self._holds = holds
        self._waiting = waiting
        self._returned = False
        self._stopped: set[str] = set()
        self.blocked: set[str | None] = set()
        """Keys that this call must not send, once it has begun. The very object may be kept for cheap look-ups."""
        waiting.add(self)

    def begin(self) -> None:
        """The call's turn has come. What is stopped now, or was at any time since the call was made, is blocked."""
        self._waiting.discard(self)
        self.blocked.update(self._holds)

    def stop(self, key: str | None) -> None:
        """A message of this key did not arrive. A message without a key has nothing behind it.

        Does nothing once the call has returned: one that was cancelled may get its answers later.
        """
        if key is not None and key not in self._stopped and not self._returned:
            self._stopped.add(key)
            self._holds[key] = self._holds.get(key, 0) + 1
            self.blocked.add(key)

    def is_sole(self, key: str | None) -> bool:
        """Whether no other call stops this key."""
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
