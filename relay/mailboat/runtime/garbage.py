"""The cycle collector, told what a relay is like.

A relay makes a hundred thousand tuples a second that live for milliseconds and hold no cycles. With the interpreter's
defaults the collector looks at all of them again and again, which cost nearly half of the processor time per event.
"""

from __future__ import annotations

import gc

_YOUNG = 50_000
"""Allocations between looks at the youngest objects: about one batch of every partition."""


def settle_collector() -> None:
    """Once, when everything that lives as long as the process has been imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 100)
