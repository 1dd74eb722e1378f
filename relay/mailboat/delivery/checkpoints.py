"""Named points of the delivery cycle.

A relay reports each point as it passes. Production ignores the reports. Tests wait for a point instead of sleeping, and
kill the process at every point to prove that no event is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Checkpoint(Enum):
    """A point in the delivery cycle."""

    CLAIMED = "claimed"
    WINDOW_OPENED = "window-opened"
    CHUNK_READ = "chunk-read"
    BATCH_TAKEN = "batch-taken"
    HANDED_OVER = "handed-over"
    ANSWERED = "answered"
    SETTLING = "settling"
    SETTLED = "settled"
    PARKED_TRIED = "parked-tried"
    DEAD_ANNOUNCED = "dead-announced"
    RELEASED = "released"


CheckpointHook = Callable[[Checkpoint], None]


def ignore_checkpoint(point: Checkpoint) -> None:
    """Ignore the point."""
