"""The named points of the pump's cycle.

A relay announces each as it passes it. In production nobody listens; tests wait for a point instead of sleeping, and
kill the process at every one of them to show that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Point(Enum):
    """Where in its cycle a relay is."""

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


Passing = Callable[[Point], None]


def unheard(point: Point) -> None:
    """Nobody listens."""
