"""Which keys must wait: something of theirs failed, and calls that were on the way by then have not returned yet.

A pump that overlaps batches learns of a failure only when the call that met it returns. Until then it may hand over
later messages of the same key, in calls that are on the way already or that it starts in good faith. A sink that
promises ``Traits.stops_behind_failure`` answers ``Undecided`` for those. This is the book it keeps.

A key is stopped by every call in which a message of it failed or was answered ``Undecided``, and is free again once all
of those calls have returned. Other keys, and so other partitions, are not touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self


class KeyStops:
    """The stopped keys of one sink. Used from its event loop only."""

    def __init__(self) -> None:
        self._holds: dict[str, int] = {}

    @property
    def stopped(self) -> Mapping[str | None, int]:
        """The live mapping of stopped keys, for cheap look-ups on the hot path; empty nearly always."""
        return self._holds  # type: ignore[return-value]  # None is never in it, and may be asked for

    def call(self) -> CallHold:
        """To be entered for the whole of one ``publish`` call."""
        return CallHold(self._holds)


class CallHold:
    """The keys that one call keeps stopped until it has returned."""

    __slots__ = ("_holds", "_keys")

    def __init__(self, holds: dict[str, int]) -> None:
        self._holds = holds
        self._keys: set[str] = set()

    def stop(self, key: str | None) -> None:
        """A message of this key did not arrive. A message without a key has nothing behind it."""
        if key is not None and key not in self._keys:
            self._keys.add(key)
            self._holds[key] = self._holds.get(key, 0) + 1

    def is_sole(self, key: str | None) -> bool:
        """Whether no other call stops this key."""
        return key is None or self._holds.get(key, 0) <= (key in self._keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keys:
            # Not now: a task that was started before this call returned, and that has not run yet, is still behind us.
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        for key in self._keys:
            left = self._holds[key] - 1
            if left:
                self._holds[key] = left
            else:
                del self._holds[key]
        self._keys.clear()
