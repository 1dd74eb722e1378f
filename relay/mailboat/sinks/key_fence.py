"""Blocked keys: keys with a failed message, while calls created before the failure was returned are still running.

A worker that overlaps batches receives a failure only when the failed call returns. Until then it may hand over later
messages of the same key. A sink with ``Traits.stops_behind_failure`` returns ``Undecided`` for those.

A call stops a key if one of its messages of that key failed or was ``Undecided``, until the call returns. The key stays
blocked for every other call that was created before then. Later calls and other keys are not affected.
"""

from collections.abc import Sequence
from typing import Self
from weakref import WeakSet

from mailboat.errors import DeliveryError
from mailboat.model import Message

KeyFence = WeakSet["FenceTicket"]
"""The calls of one sink that have not returned. Used from the sink's event loop only."""


class FenceTicket:
    """Keys that one call must not send, and keys that it blocks for other calls until it has returned. Create it when
    ``publish`` is called, not when its coroutine first runs, and enter it around the whole call."""

    def __init__(self, calls: KeyFence) -> None:
        self._calls = calls
        self._begun = False
        self._stopped: set[str] = set()
        self.blocked: set[str | None] = set().union(*(call._stopped for call in calls))
        """Keys that this call must not send, valid after ``begin``. Updated in place, so callers may keep the set."""
        calls.add(self)

    def begin(self) -> None:
        """Begin to send. Other calls block only calls that have not begun: a sink sends in the order of ``begin``."""
        self._begun = True

    def stop(self, key: str | None) -> None:
        """Record that a message of this key did not arrive; without a key it blocks nothing. No effect after the call
        has returned: a cancelled call may receive its results later."""
        if key is not None and key not in self._stopped and self in self._calls:
            self._stopped.add(key)
            for call in self._calls:
                if call is self or not call._begun:
                    call.blocked.add(key)

    def fail(self, batch: Sequence[Message], indexes: Sequence[int], error: DeliveryError) -> dict[int, DeliveryError]:
        """Stop the keys of messages that did not arrive. Return the failures, by index in the batch."""
        for index in indexes:
            self.stop(batch[index].key)
        return dict.fromkeys(indexes, error)

    def is_sole(self, key: str | None) -> bool:
        """Return whether no other call stops this key."""
        return not any(key in call._stopped for call in self._calls if call is not self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.discard(self)
